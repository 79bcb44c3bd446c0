"""The engine of one rank: which requests run in a step, on which blocks, in which step shape.

Read in the order of a step: ``request``, ``scheduler`` (with ``kv_blocks``), ``step_sync`` and
``step_shape``, ``runner``, ``sampler``; ``engine`` is the loop around them.
"""

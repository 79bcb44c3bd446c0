"""``moe-ep plan``: what fits and how fast a step will be, from a model's config and a card's data.

- ``question``: what is asked; ``checks``: what is wrong with it; ``setting``: its names looked up.
- ``cards``: data sheets. ``kernels``: the time of one kernel from bytes and operations.
- ``exchange``: the time of an all-to-all. ``step``: stages of a layer, overlap, a whole step.
- ``memory``: what a rank's memory holds. ``plan``: the answer. ``advice``: a search over plans.
- ``published``: measurements of others. ``targets``: which of them can be compared. ``fit`` (needs
  SciPy) and ``validate``: what was learnt from them, and how far that is off where it was not.
"""

"""The parts of ``bench.step_time``: geometry, measuring, roofline, and what is shown of it."""

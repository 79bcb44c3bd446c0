"""Where experts live: placements as plain data. Imports nothing from the engine."""

from eplb.placement import Placement

__all__ = ["Placement"]

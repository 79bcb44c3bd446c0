"""Where experts live, and where they should. Imports nothing from the engine.

Placements are plain data; what chooses and judges them are pure functions of loads.
"""

from eplb.balance import load_bounds, load_bounds_like
from eplb.cost import CostModel
from eplb.improve import improve
from eplb.loads import balancedness, rank_loads
from eplb.moves import Moves, count_moves
from eplb.placement import Placement
from eplb.rebalance import greedy_experts, rebalance, rebalance_experts
from eplb.shares import balanced_shares, even_shares, shared_slot_loads

__all__ = [
    "CostModel",
    "Moves",
    "Placement",
    "balanced_shares",
    "balancedness",
    "count_moves",
    "even_shares",
    "greedy_experts",
    "improve",
    "load_bounds",
    "load_bounds_like",
    "rank_loads",
    "rebalance",
    "rebalance_experts",
    "shared_slot_loads",
]

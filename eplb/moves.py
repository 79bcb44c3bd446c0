"""What it takes to get from one placement to another. Which slot serves which is for who moves.

Shape letters: L layers, E experts, R ranks, N nodes, S slots per rank.
"""

from dataclasses import dataclass

import torch

from eplb.placement import Placement


@dataclass(frozen=True, eq=False)
class Moves:
    """Experts that ranks have to fetch, int64 ``[L]``: ``between_ranks`` in all, and of them
    ``between_nodes`` those that were nowhere on the rank's node."""

    between_ranks: torch.Tensor
    between_nodes: torch.Tensor

    def num_bytes(self, bytes_per_expert: int) -> int:
        """Bytes that ranks send each other, for all layers."""
        return int(self.between_ranks.sum()) * bytes_per_expert

    def num_bytes_between_nodes(self, bytes_per_expert: int) -> int:
        return int(self.between_nodes.sum()) * bytes_per_expert


def count_moves(before: Placement, after: Placement, num_nodes: int = 1) -> Moves:
    """Moves from ``before`` to ``after``, of the same layers, slots, experts and ranks.

    Ranks are numbered node by node. An expert that only changes its slot on a rank is no move.
    Raises ValueError for placements of different sizes.
    """
    sizes = [(*p.physical_to_logical.shape, p.num_experts, p.num_ranks) for p in (before, after)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"after: layers, slots, experts and ranks {sizes[1]} given, {sizes[0]} needed"
        )
    if before.num_ranks % num_nodes:
        raise ValueError(f"num_nodes: {num_nodes} given, must divide {before.num_ranks} ranks")
    on_rank, on_node = (_was_there(before, after, num) for num in (before.num_ranks, num_nodes))
    return Moves((~on_rank).sum(1), (~on_node).sum(1))


def _was_there(before: Placement, after: Placement, num_parts: int) -> torch.Tensor:
    """bool ``[L, P]``: whether the part of the cluster with this slot had its expert before."""
    held = torch.zeros(before.num_layers, num_parts, before.num_experts, dtype=torch.bool)
    held.scatter_(2, before.physical_to_logical.unflatten(1, (num_parts, -1)), True)
    return held.gather(2, after.physical_to_logical.unflatten(1, (num_parts, -1))).flatten(1)

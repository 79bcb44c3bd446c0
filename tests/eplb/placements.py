"""Placements made at random, for tests that move experts about, and their slots by rank."""

import numpy as np
import torch

from eplb.placement import Placement


def random_placement(
    seed: int,
    *,
    num_layers: int = 2,
    num_ranks: int = 4,
    num_experts: int = 10,
    slots_per_rank: int = 4,
) -> Placement:
    """Every expert somewhere, the other slots with replicas on other ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_layers):
        order = torch.randperm(num_experts, generator=generator).tolist()
        ranks: list[list[int]] = [order[rank::num_ranks] for rank in range(num_ranks)]
        for held in ranks:
            others = [e for e in torch.randperm(num_experts, generator=generator).tolist()
                      if e not in held]  # fmt: skip
            held += others[: slots_per_rank - len(held)]
        rows.append([expert for held in ranks for expert in held])
    return Placement(torch.tensor(rows), num_experts, num_ranks)


def reshuffled(placement: Placement) -> Placement:
    """Another random one of the same sizes, the same on every rank that asks."""
    table = placement.physical_to_logical
    return random_placement(
        int((table * torch.arange(table.numel()).view_as(table)).sum()),
        num_layers=placement.num_layers,
        num_ranks=placement.num_ranks,
        num_experts=placement.num_experts,
        slots_per_rank=placement.num_slots_per_rank,
    )


def slots_of(placement: Placement) -> np.ndarray:
    """int64 ``[L, R, S]``: the experts of each rank."""
    return placement.physical_to_logical.numpy().reshape(
        placement.num_layers, placement.num_ranks, -1
    )

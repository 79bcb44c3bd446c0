"""The rule that DeepSeek published with EPLB, written plainly: one layer, one item at a time.

What ``eplb`` is measured against, and in tests an independent statement of the rule. Sums are in
float32 and ties go to the first, as there. Its replicas of one expert may land on one GPU.
"""

import numpy as np
import torch


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments and outputs as ``eplb.rebalance_experts``."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    sizes = (num_replicas, num_groups, num_nodes, num_gpus)
    layers = [_place_layer(row, *sizes) for row in weight.float().cpu().numpy()]
    experts, replicas = (np.array(column) for column in zip(*layers, strict=True))
    counts = np.zeros(weight.shape, np.int64)
    slots = np.full((*weight.shape, replicas.max() + 1), -1)
    for layer, (its_experts, its_replicas) in enumerate(zip(experts, replicas, strict=True)):
        np.add.at(counts[layer], its_experts, 1)
        slots[layer, its_experts, its_replicas] = np.arange(num_replicas)
    return torch.from_numpy(experts), torch.from_numpy(slots), torch.from_numpy(counts)


def _place_layer(
    weights: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[list[int], list[int]]:
    """For each slot its expert, and which of its expert's replicas it is."""
    experts_per_group = len(weights) // num_groups
    groups = weights.reshape(num_groups, -1).sum(1, dtype=np.float32)
    experts, replicas = [], []
    for node_groups in _pack(groups, num_nodes):
        first = [group * experts_per_group for group in node_groups]
        of_node = [start + i for start in first for i in range(experts_per_group)]
        chosen, numbers, loads = _replicate(weights[of_node], num_replicas // num_nodes)
        for gpu in _pack(loads, num_gpus // num_nodes):
            experts += [of_node[chosen[item]] for item in gpu]
            replicas += [numbers[item] for item in gpu]
    return experts, replicas


def _replicate(weights: np.ndarray, num_slots: int) -> tuple[list[int], list[int], np.ndarray]:
    """One slot for each expert; then each to where a replica has most. Third, the slots' loads."""
    counts = np.ones(len(weights), np.float32)
    chosen, numbers = list(range(len(weights))), [0] * len(weights)
    while len(chosen) < num_slots:
        expert = int((weights / counts).argmax())
        chosen.append(expert)
        numbers.append(int(counts[expert]))
        counts[expert] += 1
    return chosen, numbers, (weights / counts)[chosen]


def _pack(weights: np.ndarray, num_packs: int) -> list[list[int]]:
    """Items of each pack, as many in each: the heaviest first, to the lightest pack with room."""
    room = len(weights) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    loads = [np.float32(0)] * num_packs
    for item in np.argsort(-weights, kind="stable").tolist():
        open_packs = (pack for pack in range(num_packs) if len(packs[pack]) < room)
        lightest = min(open_packs, key=loads.__getitem__)
        packs[lightest].append(item)
        loads[lightest] += weights[item]
    return packs

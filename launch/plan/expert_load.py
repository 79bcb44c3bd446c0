"""The imbalance that recorded loads give under the placement that is made from them.

The one part of a plan that imports torch, because placements are tensors; only where a file is
given.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from moe_ep.config import ConfigError, ModelConfig, Problem

if TYPE_CHECKING:
    import torch


@cache
def placed_imbalance(file: Path, model: ModelConfig, *, ep_size: int, num_slots: int) -> float:
    """Tokens of the busiest rank over the mean, averaged over layers and over the file's steps.

    file: loads of logical experts, as the engine's recorder and SGLang's write them
    (``eplb.files``). Experts are placed by the sum over all steps, as a start with
    ``--init-expert-location`` does it, and each step is then held against that placement. Raises
    ConfigError when the file cannot be used.
    """
    from eplb.loads import balancedness, expected_rank_loads
    from eplb.rebalance import rebalance

    loads = _read(file, model)
    placement = rebalance(loads.sum(0), num_slots=ep_size * num_slots, num_ranks=ep_size)
    ratios = [
        float((1 / balancedness(expected_rank_loads(step, placement))).mean()) for step in loads
    ]
    return sum(ratios) / len(ratios)


def load_problems(file: Path, model: ModelConfig) -> tuple[Problem, ...]:
    """Why the file cannot be used for the model."""
    try:
        _read(file, model)
    except ConfigError as error:
        return error.problems
    return ()


@cache
def _read(file: Path, model: ModelConfig) -> "torch.Tensor":
    """float64 ``[steps, layers, experts]``."""
    from eplb.files import FileError, ModelLayers, read_loads

    layers = ModelLayers(model.num_moe_layers, model.first_k_dense_replace, model.num_experts)
    try:
        return read_loads(file, layers)
    except FileError as error:
        allowed = "loads of this model's experts, in JSON (logical_count) or as .pt"
        raise ConfigError([Problem("expert_load", str(file), allowed, f"{error}.")]) from error

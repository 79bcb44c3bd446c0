"""Recorded loads and the cluster to place them on, checked; ``ConfigError`` names the flag."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eplb.cost import CostModel
from eplb.files import FileError, ModelLayers, read_loads
from moe_ep.config import ConfigError, EngineConfig, ModelConfig, Problem
from moe_ep.engine.eplb import cost_model


@dataclass(frozen=True, eq=False)
class Recorded:
    """loads: float64 ``[steps, MoE layers, experts]``. num_dense: layers before them. model: None
    when it was not named. cost: what the engine would judge placements by."""

    loads: torch.Tensor
    num_dense: int
    model: ModelConfig | None
    cost: CostModel


def read_recorded(args: argparse.Namespace) -> Recorded:
    """What ``--loads`` and ``--model`` name; the ranks and redundant experts fit it."""
    model = None if args.model is None else ModelConfig.from_path(args.model)
    loads = _read_all(args.loads, model)
    if model is None:
        num_dense = _num_unused(loads)
        loads = loads[:, num_dense:]
    else:
        num_dense = model.first_k_dense_replace
    problems = _sizes(loads.shape[2], args.ep_size, args.ep_num_redundant_experts)
    if problems := problems + _node_problems(args):
        raise ConfigError(problems)
    return Recorded(loads, num_dense, model, _cost(args, model))


def _cost(args: argparse.Namespace, model: ModelConfig | None) -> CostModel:
    if model is None:
        return CostModel(num_nodes=args.num_nodes)
    price = args.eplb_node_traffic_price
    return cost_model(EngineConfig(model="", eplb_node_traffic_price=price), model, args.num_nodes)


def _read_all(paths: Sequence[Path], model: ModelConfig | None) -> torch.Tensor:
    layers = None
    if model is not None:
        layers = ModelLayers(model.num_moe_layers, model.first_k_dense_replace, model.num_experts)
    try:
        parts = [read_loads(path, layers) for path in paths]
    except FileError as error:
        allowed = "files of the expert distribution recorder (mode stat), .json or .pt"
        raise ConfigError([Problem("loads", _names(paths), allowed, f"{error}.")]) from error
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        fix = f"Layers and experts are {sorted(shapes)} in them."
        raise ConfigError([Problem("loads", _names(paths), "files of one model", fix)])
    return torch.cat(parts)


def _num_unused(loads: torch.Tensor) -> int:
    """Leading layers without any token: dense ones, which SGLang's files have rows for."""
    used = (loads.sum((0, 2)) > 0).nonzero()
    return int(used[0]) if len(used) else 0


def _sizes(num_experts: int, num_ranks: int, num_redundant: int) -> list[Problem]:
    if num_ranks < 2:
        fix = "One rank has nothing to balance."
        return [Problem("ep_size", num_ranks, "at least 2", fix)]
    num_slots = num_experts + num_redundant
    most = num_experts * (num_ranks - 1)
    if not 0 <= num_redundant <= most:
        fix = "With more, two replicas of one expert would share a rank."
        return [Problem("ep_num_redundant_experts", num_redundant, f"0 to {most}", fix)]
    if num_slots % num_ranks:
        allowed = f"a divisor of {num_slots} ({num_experts} experts + {num_redundant} redundant)"
        fix = f"Or use --ep-num-redundant-experts {num_redundant + -num_slots % num_ranks}."
        return [Problem("ep_size", num_ranks, allowed, fix)]
    return []


def _node_problems(args: argparse.Namespace) -> list[Problem]:
    problems = []
    if args.num_nodes < 1 or args.ep_size % args.num_nodes:
        allowed = f"a divisor of {args.ep_size}, the EP size"
        fix = "Every machine has equally many ranks."
        problems.append(Problem("num_nodes", args.num_nodes, allowed, fix))
    price = args.eplb_node_traffic_price
    if not 0 <= price < float("inf"):
        fix = "0 places by balance alone."
        problems.append(Problem("eplb_node_traffic_price", price, "at least 0", fix))
    elif price and args.model is None:
        fix = "Traffic depends on the router's groups: name the model, too."
        problems.append(Problem("eplb_node_traffic_price", price, "0 without --model", fix))
    return problems


def _names(paths: Sequence[Path]) -> str:
    return " ".join(map(str, paths))

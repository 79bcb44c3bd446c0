"""``moe-ep eplb place``: a placement for the start of an engine, from recorded loads."""

import argparse

import torch

from eplb.files import FileError, write_placement
from eplb.loads import balancedness, expected_rank_loads
from eplb.placement import Placement
from eplb.rebalance import rebalance
from launch.eplb_tool.source import read_recorded
from moe_ep.config import ConfigError, Problem


def run(args: argparse.Namespace) -> int:
    recorded = read_recorded(args)
    loads = recorded.loads.sum(0)
    num_layers, num_experts = loads.shape
    num_redundant = args.ep_num_redundant_experts
    placement = rebalance(
        loads,
        num_slots=num_experts + num_redundant,
        num_ranks=args.ep_size,
        cost=recorded.cost,
    )
    try:
        write_placement(args.output, placement, num_dense=recorded.num_dense)
    except FileError as error:
        problem = Problem("output", str(args.output), "a .json or .pt file", f"{error}.")
        raise ConfigError([problem]) from error
    in_order = Placement.trivial(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=args.ep_size,
        num_redundant=num_redundant,
    )
    print(f"{args.output}: {num_layers} layers, {placement.num_slots_per_rank} slots per rank")
    print(f"balancedness under these loads: {_told(placement, loads)}")
    print(f"with experts in order instead:  {_told(in_order, loads)}")
    print(
        f"Start with: --ep-size {args.ep_size} --ep-num-redundant-experts {num_redundant}"
        f" --init-expert-location {args.output}"
    )
    return 0


def _told(placement: Placement, loads: torch.Tensor) -> str:
    found = balancedness(expected_rank_loads(loads, placement))
    return f"mean {float(found.mean()):.3f}, worst layer {float(found.min()):.3f}"

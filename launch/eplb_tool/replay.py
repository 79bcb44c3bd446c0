"""``moe-ep eplb replay``: would re-placing experts help this workload?"""

import argparse
import json
from dataclasses import dataclass, replace
from functools import partial

import torch

from eplb.replay import Cluster, PolicyReplay, replay
from eplb.verdict import Verdict, judge
from launch.eplb_tool.source import Recorded, read_recorded
from launch.plan.plan import make_plan
from launch.plan.question import Question
from moe_ep.config import ConfigError, EngineConfig, ModelConfig, Problem
from moe_ep.engine.eplb import next_placement
from moe_ep.engine.memory import WeightStorage, expert_bytes

DEFAULT_WINDOWS = 10


@dataclass(frozen=True, eq=False)
class Replayed:
    """window: steps in each. bytes_per_expert: None without a model. layer_us: estimated time of an
    MoE layer under each policy, empty without a GPU."""

    cluster: Cluster
    num_experts: int
    num_steps: int
    window: int
    policies: list[PolicyReplay]
    bytes_per_expert: int | None
    layer_us: dict[str, float]
    verdict: Verdict

    def redundant_experts(self, policy: PolicyReplay) -> int:
        """What a rank holds beyond its share of the experts, all layers together."""
        extra = (policy.num_slots - self.num_experts) * policy.tokens.shape[1]
        return extra // self.cluster.num_ranks


def run(args: argparse.Namespace) -> int:
    """0, also when it would not help."""
    recorded = read_recorded(args)
    if problems := _problems(args, recorded):
        raise ConfigError(problems)
    found = replayed(args, recorded)
    from launch.eplb_tool.report import as_json, print_report

    print_report(found)
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(found), indent=1), encoding="utf-8")
    if args.plot is not None:
        from launch.eplb_tool.plot import draw

        draw(found, args.plot)
    return 0


def replayed(args: argparse.Namespace, recorded: Recorded) -> Replayed:
    num_steps, _, num_experts = recorded.loads.shape
    window, model = _window(args, num_steps), recorded.model
    cluster = Cluster(
        num_ranks=args.ep_size,
        num_redundant=args.ep_num_redundant_experts,
        num_nodes=args.num_nodes,
        num_groups=model.n_group if model is not None else 1,
    )
    place = partial(next_placement, cost=recorded.cost)
    policies = replay(_windows(recorded.loads, window), cluster, place, recorded.cost)
    return Replayed(
        cluster=cluster,
        num_experts=num_experts,
        num_steps=num_steps,
        window=window,
        policies=policies,
        bytes_per_expert=None if model is None else _bytes_per_expert(model),
        layer_us=_layer_us(args, policies, num_experts) if args.gpu is not None else {},
        verdict=judge(policies, cluster.num_redundant),
    )


def _window(args: argparse.Namespace, num_steps: int) -> int:
    return args.window or max(1, num_steps // DEFAULT_WINDOWS)


def _windows(loads: torch.Tensor, window: int) -> torch.Tensor:
    """``[W, L, E]``; steps at the end that fill no window are left out."""
    whole = loads[: len(loads) // window * window]
    return whole.unflatten(0, (-1, window)).sum(1)


def _problems(args: argparse.Namespace, recorded: Recorded) -> list[Problem]:
    problems, num_steps = [], len(recorded.loads)
    if num_steps < 2:
        fix = "Record with --expert-distribution-recorder-mode stat, or name several files."
        problems.append(Problem("loads", f"{num_steps} step", "2 recorded steps or more", fix))
    elif args.window is not None and not 1 <= args.window <= num_steps // 2:
        fix = "A window is judged by what the one before it taught."
        allowed = f"1 to {num_steps // 2}, half of the {num_steps} recorded steps"
        problems.append(Problem("window", args.window, allowed, fix))
    if args.gpu is not None and args.model is None:
        fix = "Name the model, too: --model."
        problems.append(Problem("gpu", args.gpu, "nothing without --model", fix))
    return problems


def _bytes_per_expert(model: ModelConfig) -> int:
    config = EngineConfig(model="", moe_runner_backend="deep_gemm")
    config = replace(config, dtype=config.compute_dtype(model))
    return expert_bytes(model, WeightStorage.of(config, model))


def _layer_us(
    args: argparse.Namespace, policies: list[PolicyReplay], num_experts: int
) -> dict[str, float]:
    """By ``moe-ep plan``'s model, with each policy's mean imbalance and slots."""
    question = Question(
        model=args.model,
        gpu=args.gpu,
        ep_size=args.ep_size,
        phase=args.phase,
        batch=args.batch,
        context=args.context,
    )
    return {
        policy.name: make_plan(
            replace(
                question,
                ep_num_redundant_experts=policy.num_slots - num_experts,
                imbalance=float(policy.balancedness.reciprocal().mean()),
            )
        ).step.layer_us
        for policy in policies
    }

"""EPLB on this rank's engine: where experts are at the start, and re-placing them between steps.

Joins ``eplb``, which knows loads, placements and how ranks stay of one mind, to what it must not
know: configuration, layers, banks of experts, streams of a GPU.
"""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from eplb.cost import CostModel
from eplb.dispatch import DISPATCH_ALGORITHMS
from eplb.files import PLACEMENT, FileError, ModelLayers, fit_loads, fit_placement, read_file
from eplb.improve import improve
from eplb.loads import LoadRecorder
from eplb.manager import Manager, Settings
from eplb.placement import Placement
from eplb.rebalance import rebalance
from eplb.status import EplbStatus
from moe_ep.config import ConfigError, EngineConfig, ModelConfig, Problem
from moe_ep.engine.step_shape import StepShape
from moe_ep.engine.world import World
from moe_ep.layer import MoELayer

logger = logging.getLogger(__name__)

TRIVIAL = "trivial"
# What a rank loses by fetching an expert, as a share of its work in a window. One of DeepSeek-V3
# (44 MB in FP8) takes a link of 50 GB/s about 1 ms, and a layer about 1 s in 1,000 decode steps;
# twice that, as chance makes windows differ, too.
MOVE_PRICE = 0.002


class Location(NamedTuple):
    """slot_table: int64 ``[L, E, W]``, by which this rank routes; see ``eplb.dispatch``."""

    placement: Placement
    slot_table: torch.Tensor


def initial_location(config: EngineConfig, model: ModelConfig, world: World) -> Location:
    """Where experts are loaded, in order or as ``init_expert_location`` says, and where tokens go.
    Collective.

    Raises ConfigError for a file that does not fit, RuntimeError when ranks read different ones.
    """
    loads, placement = None, _trivial(config, model)
    if config.init_expert_location != TRIVIAL:
        placement, loads = _agreed_file(config, model, world)
    make_table = DISPATCH_ALGORITHMS[config.ep_dispatch_algorithm]
    return Location(placement, make_table(placement, world.rank, loads))


def cost_model(config: EngineConfig, model: ModelConfig, num_nodes: int) -> CostModel:
    """What placements are judged by, without the price of moves."""
    num_groups, topk_group = model.router_groups
    return CostModel(
        num_nodes=num_nodes,
        num_groups=num_groups,
        topk_group=topk_group,
        num_experts_per_tok=model.num_experts_per_tok,
        price_per_crossing=config.eplb_node_traffic_price,
    )


def count_nodes(hosts: Sequence[str]) -> int:
    """Machines, by the host of each rank; 1 where ranks are not numbered machine by machine, as
    many on each."""
    names = list(dict.fromkeys(hosts))
    per_node = len(hosts) // len(names)
    in_order = [name for name in names for _ in range(per_node)]
    return len(names) if list(hosts) == in_order else 1


def _agreed_file(
    config: EngineConfig, model: ModelConfig, world: World
) -> tuple[Placement, torch.Tensor | None]:
    """The placement of the file, and the loads that it was made from if the file has loads."""
    try:
        placement, loads = _from_file(config, model, count_nodes(world.hosts))
    except FileError as error:
        fix = "Or use --init-expert-location trivial."
        allowed = "a file for this model, these ranks and redundant experts"
        given = config.init_expert_location
        problem = Problem("init_expert_location", given, allowed, f"{error}. {fix}")
        raise ConfigError([problem]) from error
    digest = hashlib.sha256(placement.physical_to_logical.numpy().tobytes()).hexdigest()
    if len(set(digests := world.gather(digest))) > 1:
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        raise RuntimeError(
            f"init_expert_location: {config.init_expert_location} is another file on ranks"
            f" {different} than on rank 0"
        )
    return placement, loads


def _trivial(config: EngineConfig, model: ModelConfig) -> Placement:
    return Placement.trivial(
        num_layers=model.num_moe_layers,
        num_experts=model.num_experts,
        num_ranks=config.ep_size,
        num_redundant=config.ep_num_redundant_experts,
    )


def _from_file(
    config: EngineConfig, model: ModelConfig, num_nodes: int
) -> tuple[Placement, torch.Tensor | None]:
    path = config.init_expert_location
    layers = ModelLayers(model.num_moe_layers, model.first_k_dense_replace, model.num_experts)
    kind, values = read_file(path)
    num_slots = model.num_experts + config.ep_num_redundant_experts
    num_ranks = config.ep_size
    if kind == PLACEMENT:
        placement = fit_placement(path, values, layers, num_slots=num_slots, num_ranks=num_ranks)
        return placement, None
    loads = fit_loads(path, values, layers).sum(0)
    cost = cost_model(config, model, num_nodes)
    return rebalance(loads, num_slots=num_slots, num_ranks=num_ranks, cost=cost), loads


class EngineSlots:
    """This rank's slots as the manager sees them; see ``eplb.manager.Slots``.

    On a GPU what runs beside steps has a stream of its own: it neither waits for a step nor makes
    one wait.
    """

    def __init__(
        self, layers: Sequence[MoELayer], experts: torch.Tensor, device: torch.device
    ) -> None:
        """experts: ``[L, S]``, what the slots hold at the start."""
        self.experts = experts.clone()
        self._layers = layers
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def tokens(self) -> torch.Tensor:
        return torch.stack([layer.slot_tokens for layer in self._layers]).cpu()

    def export(self, layer: int, slot: int) -> list[torch.Tensor]:
        with self._beside_steps():
            return [part.cpu() for part in self._layers[layer].experts.slot_tensors(slot)]

    def stage(self, layer: int, tensors: list[torch.Tensor]) -> object:
        with self._beside_steps():
            staged = self._layers[layer].experts.stage(tensors)
        if self._stream is not None:
            self._stream.synchronize()
        return staged

    def install(
        self,
        layer: int,
        staged: dict[int, object],
        *,
        experts: torch.Tensor,
        slot_table: torch.Tensor,
    ) -> None:
        self.experts[layer] = experts
        moe = self._layers[layer]
        for slot, expert in staged.items():
            moe.experts.load_staged(slot, expert)
        moe.router.slot_table.copy_(slot_table)  # in place: captured steps read it there
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # before it exports these slots

    def _beside_steps(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class Balancer:
    """The engine's view of it: two flags for the vote, calls before steps and sleeps.

    recorder: None when ``expert_distribution_recorder_mode`` is off.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        placement: Placement,
        layers: Sequence[MoELayer],
        world: World,
    ) -> None:
        """placement: as loaded. Collective."""
        self._slots = EngineSlots(layers, placement.of_rank(world.rank), world.device)
        self._manager = None
        if config.enable_eplb:
            cost = cost_model(config, model, count_nodes(world.hosts))
            self._manager = _manager(config, placement, self._slots, world, cost)
        self.recorder = None
        if config.expert_distribution_recorder_mode != "off":
            num_steps = config.expert_distribution_recorder_buffer_size
            self.recorder = LoadRecorder(world.rank, num_steps)

    @property
    def is_done(self) -> bool:
        return self._manager is not None and self._manager.is_done

    @property
    def has_failed(self) -> bool:
        return self._manager is not None and self._manager.has_failed

    def before_step(self, step: int, shape: StepShape) -> None:
        self._record(step)  # what the step before did, in the placement that it had
        if self._manager is not None:
            self._manager.advance(all_done=shape.eplb_done, any_failed=shape.eplb_failed)

    def before_sleep(self, step: int) -> None:
        """step: the one that comes after it."""
        self._record(step)
        if self._manager is not None:
            self._manager.rest()

    def status(self) -> EplbStatus | None:
        return None if self._manager is None else self._manager.status()

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()

    def _record(self, step: int) -> None:
        if self.recorder is not None and self.recorder.wants_counts:
            self.recorder.record(step, self._slots.tokens(), self._slots.experts)


def _manager(
    config: EngineConfig, placement: Placement, slots: EngineSlots, world: World, cost: CostModel
) -> Manager:
    hosts = sorted(set(world.hosts))
    return Manager(
        placement=placement,
        rank=world.rank,
        nodes=[hosts.index(host) for host in world.hosts],
        group=dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s)),
        slots=slots,
        rebalance=partial(next_placement, cost=cost),
        make_table=DISPATCH_ALGORITHMS[config.ep_dispatch_algorithm],
        settings=Settings(
            num_iterations=config.eplb_rebalance_num_iterations,
            min_utilization=config.eplb_min_rebalancing_utilization_threshold,
            bytes_per_step=config.eplb_bytes_per_step,
            alarm_after_s=config.watchdog_timeout_s,
        ),
    )


def next_placement(loads: torch.Tensor, current: Placement, cost: CostModel) -> Placement:
    """The placement to have under loads ``[L, E]``: the one in force, but for what pays to move.

    cost: without a price of moves. Ranks fetch side by side, so of the moves of all ranks each
    costs its part.
    """
    work = float(loads.sum(1).double().mean()) / current.num_ranks
    price = MOVE_PRICE * work / current.num_ranks
    return improve(current, loads, cost=replace(cost, price_per_move=price))

"""Which decode steps are captured as graphs, that all ranks agree, and that kernels can be."""

from itertools import pairwise

import pytest
import torch

from moe_ep.config import EngineConfig
from moe_ep.config.overlap import OverlapRules
from moe_ep.dispatch.base import Dispatched, Mode
from moe_ep.engine import graphs
from moe_ep.engine.graphs import default_sizes, micro_batch_sizes, resolve_graphs, step_sizes
from moe_ep.engine.step_shape import StepRules, Vote, derive
from moe_ep.engine.world import World
from moe_ep.experts import ExpertSpec, create_experts
from moe_ep.fp8 import FP8
from tests.compare import assert_bits_equal
from tests.emulators.cuda_graph import EmulatedGraphMaker
from tests.emulators.device import emulated_kernels
from tests.emulators.install import emulated
from tests.engine.driver import kernels_alone, run_engine, world_alone
from tests.engine.graph_makers import emulated_graphs
from tests.engine.test_parity import FP8 as FP8_TOLERANCE
from tests.engine.test_parity import check_rows, config_for, prompt_requests, reference, shortened
from tests.experts.cases import SlotInputs, random_weights, valid_rows
from tests.kernels.cases import DEVICE, to_device
from tests.tiny import tiny_checkpoint

NAMED = {
    "moe_a2a_backend": "deepep",
    "moe_runner_backend": "deep_gemm",
    "attention_backend": "flash_mla",
}


def resolved(**flags) -> tuple[EngineConfig, dict[str, str]]:
    """The config where there are graphs, and the reasons of what was settled."""
    with emulated("deep_ep"), emulated_kernels(), emulated_graphs(EmulatedGraphMaker()):
        config, choices = resolve_graphs(EngineConfig(model="m", **(NAMED | flags)), world_alone())
    return config, {choice.field: choice.reason for choice in choices}


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, *range(8, 65, 8))),
    ],
)
def test_default_sizes_rise_to_the_largest_step(most: int, sizes: tuple[int, ...]) -> None:
    assert default_sizes(most) == sizes


def test_many_sizes_are_not_very_many() -> None:
    sizes = default_sizes(1000)
    assert len(sizes) < 60
    assert all(later / size <= 2 for size, later in pairwise(sizes))
    assert sizes[-1] == 1000


def test_capturing_is_the_default_where_it_can_be() -> None:
    config, reasons = resolved(max_num_seqs=8)
    assert (config.cuda_graph_bs, config.enforce_eager) == ((1, 2, 4, 8), False)
    assert reasons == {"cuda_graph_bs": "up to max_num_seqs"}
    config, reasons = resolved(cuda_graph_bs=(3,))
    assert (config.cuda_graph_bs, config.enforce_eager, reasons) == ((3,), False, {})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"moe_a2a_backend": "collective"}, "collective: the host waits"),
        ({"deepep_mode": "normal"}, "deepep: the host waits"),
        ({"deepep_mode": "normal", "moe_a2a_backend": "deepep_v2"}, "deepep_v2: the host waits"),
        ({"moe_runner_backend": "torch"}, "torch: the host reads"),
        ({"attention_backend": "torch"}, "torch: its plans"),
    ],
)
def test_what_cannot_be_captured_is_padded_only_when_asked(flags: dict, reason: str) -> None:
    config, reasons = resolved(**flags)
    assert (config.cuda_graph_bs, config.enforce_eager) == ((), True)
    assert reasons["enforce_eager"].startswith(reason)
    config, _ = resolved(cuda_graph_bs=(2, 4), **flags)
    assert (config.cuda_graph_bs, config.enforce_eager) == ((2, 4), True)


def test_no_graphs_when_told_and_on_a_cpu() -> None:
    config, reasons = resolved(enforce_eager=True)
    assert (config.cuda_graph_bs, list(reasons)) == ((), ["cuda_graph_bs"])
    config, choices = resolve_graphs(EngineConfig(model="m", **NAMED), world_alone())
    assert (config.cuda_graph_bs, config.enforce_eager) == ((), True)
    assert choices[0].reason == "no graphs on a cpu device"


class UnlikeWorld(World):
    """The other rank has no graphs."""

    def gather(self, value):
        return [value, "torch: its plans"]


def test_one_rank_that_cannot_keeps_all_from_capturing() -> None:
    world = UnlikeWorld(rank=0, num_ranks=1, store=None, timeout_s=1.0)
    with emulated("deep_ep"), emulated_kernels(), emulated_graphs(EmulatedGraphMaker()):
        config, choices = resolve_graphs(EngineConfig(model="m", **NAMED), world)
    assert (config.enforce_eager, choices[0].reason) == (True, "torch: its plans")


def test_every_bucket_has_its_steps_and_no_other_step_has_a_graph() -> None:
    rules = StepRules("auto", 16, buckets=(3, 8, 16), overlap=OverlapRules(decode=8, prefill=8))
    sizes = step_sizes(rules)
    assert sizes == {(3,), (8,), (16,), (4, 4), (8, 8)}
    step = graphs.StepGraphs(
        maker=None, mode=Mode.LOW_LATENCY, attention=None, dispatcher=None, cache=None, max_blocks=1
    )
    step._steps = {entry: str(entry) for entry in sizes}
    found = {}
    for num_decodes in range(1, 20):
        for num_prefill in (0, 1):
            vote = Vote(0, num_decodes, num_prefill, num_largest_part=-(-num_decodes // 2))
            shape = derive([vote, Vote(0)], rules)
            found[num_decodes, num_prefill] = step.find(shape)
            if num_prefill == 0 and num_decodes <= 16:
                assert step.find(shape) == str(micro_batch_sizes(shape))
    assert all(found[n, 1] is None for n in range(1, 20)), "prefill"
    assert found[17, 0] is None, "over the capacity"
    assert {found[n, 0] for n in (8, 9, 16)} == {"(4, 4)", "(8, 8)"}


@pytest.mark.parametrize("is_masked", [True, False], ids=["masked", "contiguous"])
@pytest.mark.parametrize("backend", ["deep_gemm", "triton"])
def test_experts_can_be_captured(backend: str, is_masked: bool) -> None:
    """Replayed with other counts: the layout is read on the device."""
    spec = ExpertSpec(
        3, hidden=256, intermediate=128, dtype=torch.bfloat16, is_fp8=True, device=DEVICE
    )

    def dispatched(counts: list[int], seed: int) -> Dispatched:
        inputs = SlotInputs.random(counts, spec.hidden, FP8, seed)
        return to_device(inputs.masked(128) if is_masked else inputs.contiguous(128))

    with emulated_kernels():
        experts = create_experts(backend, spec)
        for slot in range(spec.num_slots):
            experts.load_slot(slot, random_weights(spec, slot))
        fixed = dispatched([5, 3, 1], 0)
        experts(fixed)
        graph, y = EmulatedGraphMaker().capture(lambda: experts(fixed))
        for seed, counts in enumerate([[1, 7, 4], [2, 9, 1]]):
            step = dispatched(counts, seed)
            for name in ("rows", "scales"):
                getattr(fixed, name).view(torch.uint8).copy_(getattr(step, name).view(torch.uint8))
            for name, value in vars(step.layout).items():
                if isinstance(value, torch.Tensor):
                    getattr(fixed.layout, name).copy_(value)
            graph.replay()
            pairs = zip(valid_rows(y, step), valid_rows(experts(step), step), strict=True)
            for got, want in pairs:
                assert_bits_equal(got, want)


def test_one_rank_on_triton_kernels_alone() -> None:
    """As on one GPU without libraries; the interpreter stands in for its kernels.

    The local exchange without a word from the host, the router, the latents: all in kernels.
    """
    num_prompts, num_new = 3, 3
    checkpoint = tiny_checkpoint("v3-steady", dtype="bfloat16", fp8=True)
    config = config_for(
        checkpoint,
        moe_runner_backend="triton",
        attention_backend="triton",
        max_num_seqs=num_prompts,
        cuda_graph_bs=(num_prompts,),
        num_kv_blocks=8,
    )
    maker = EmulatedGraphMaker()
    with kernels_alone(), emulated_graphs(maker):
        result = run_engine(config, world_alone(), prompt_requests(num_new)[:num_prompts])
    assert [graph.num_replays for graph in maker.graphs] == [num_new - 1]
    expected = reference("v3-steady", fp8=True, dtype="bfloat16")
    check_rows([result], shortened(expected, num_prompts, num_new), FP8_TOLERANCE)

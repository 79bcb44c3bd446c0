"""The MoE layer against transformers' DeepseekV3MoE, on 1, 2 and 4 ranks, with replicas."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from attention.mla import Part
from eplb import Placement
from moe_ep import overlap
from moe_ep.dispatch import DispatchSpec, Mode, create_dispatcher
from moe_ep.experts import ExpertSpec, ExpertWeights, create_experts
from moe_ep.gate import Gate
from moe_ep.layer import MoELayer
from moe_ep.progress import Progress, Stage, Track
from moe_ep.router import Router
from tests.compare import assert_bits_equal, assert_rows_close
from tests.ranks import RankInfo, RankPool

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 64, 32, 8, 3
NUM_PADDING = 2


@dataclass(frozen=True)
class Weights:
    """One layer of a checkpoint: router, bias, stacked experts and the shared expert."""

    router: torch.Tensor
    bias: torch.Tensor
    gate_up: torch.Tensor  # [E, 2I, H]
    down: torch.Tensor  # [E, H, I]
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def expert(self, index: int) -> ExpertWeights:
        gate, up = self.gate_up[index].chunk(2)
        return ExpertWeights(gate=gate, up=up, down=self.down[index])

    def shared_expert(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.shared
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _weights() -> Weights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    shared = (draw(INTERMEDIATE, HIDDEN), draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE))
    return Weights(
        router=draw(NUM_EXPERTS, HIDDEN),
        bias=draw(NUM_EXPERTS),
        gate_up=draw(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        down=draw(NUM_EXPERTS, HIDDEN, INTERMEDIATE),
        shared=shared,
    )


def _tokens(rank: int, num_tokens: int, num_padding: int = NUM_PADDING) -> torch.Tensor:
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(100 + rank))
    return F.pad(x, (0, 0, 0, num_padding), value=float("nan"))


def _make_layer(placement: Placement, rank: int, group) -> MoELayer:
    weights = _weights()
    spec = DispatchSpec(
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        num_ranks=placement.num_ranks,
        num_slots_per_rank=placement.num_slots_per_rank,
        max_tokens_per_rank=16,
        capacity=16,
        payload_dtype=torch.float32,
        out_dtype=torch.float32,
    )
    experts = create_experts(
        "torch", ExpertSpec(spec.num_slots_per_rank, HIDDEN, INTERMEDIATE, torch.float32, False)
    )
    for slot, expert in enumerate(placement.local_experts(0, rank)):
        experts.load_slot(slot, weights.expert(expert))
    gate = Gate(
        weight=weights.router,
        bias=weights.bias,
        num_topk=NUM_TOPK,
        n_group=4,
        topk_group=2,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    return MoELayer(
        router=Router(gate, placement.slot_table(rank)[0].unsqueeze(1)),
        dispatcher=create_dispatcher("auto", spec, group),
        experts=experts,
        shared_expert=weights.shared_expert,
    )


def _forward(layer: MoELayer, x: torch.Tensor, num_tokens: int, mode: Mode, track=None):
    is_padding = torch.arange(len(x)) >= num_tokens
    return layer.forward(x, is_padding, mode, track or Track(Progress()))


def _run_layer(
    info: RankInfo, placement: Placement, num_tokens: tuple[int, ...]
) -> tuple[dict[Mode, torch.Tensor], list[int]]:
    layer = _make_layer(placement, info.rank, info.group)
    own = num_tokens[info.rank]
    outs = {
        mode: overlap.run([_forward(layer, _tokens(info.rank, own), own, mode)])[0][:own]
        for mode in Mode
    }
    return outs, layer.slot_tokens.tolist()


def _expected(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' output, and its tokens per expert."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    weights = _weights()
    config = v3.DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_TOPK,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        num_attention_heads=4,
    )
    moe = v3.DeepseekV3MoE(config)
    gate, up, down = weights.shared
    state = {
        "gate.weight": weights.router,
        "gate.e_score_correction_bias": weights.bias,
        "experts.gate_up_proj": weights.gate_up,
        "experts.down_proj": weights.down,
        "shared_experts.gate_proj.weight": gate,
        "shared_experts.up_proj.weight": up,
        "shared_experts.down_proj.weight": down,
    }
    moe.load_state_dict(state)
    with torch.no_grad():
        idx = moe.gate(x)[2]
        return moe(x.unsqueeze(0))[0], idx.flatten().bincount(minlength=NUM_EXPERTS)


PLACEMENTS = {
    "one rank": Placement.trivial(num_layers=1, num_experts=8, num_ranks=1),
    "two ranks": Placement.trivial(num_layers=1, num_experts=8, num_ranks=2),
    "four ranks": Placement.trivial(num_layers=1, num_experts=8, num_ranks=4),
    "replicas": Placement.trivial(num_layers=1, num_experts=8, num_ranks=2, num_redundant=2),
    "replicas everywhere": Placement.trivial(
        num_layers=1, num_experts=8, num_ranks=2, num_redundant=8
    ),
    "shuffled replicas": Placement(torch.tensor([[5, 3, 0, 7, 0, 1, 2, 3, 5, 4, 6, 0]]), 8, 4),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_equals_transformers(rank_pool: RankPool, name: str):
    placement = PLACEMENTS[name]
    num_tokens = (9, 0, 14, 1)[: placement.num_ranks]
    results = rank_pool.run(_run_layer, placement.num_ranks, placement, num_tokens)
    tokens = torch.cat([_tokens(r, n, 0) for r, n in enumerate(num_tokens)])
    expected, expert_tokens = _expected(tokens)
    for outs, rows in zip(
        [outs for outs, _ in results], expected.split(list(num_tokens)), strict=True
    ):
        for out in outs.values():
            assert_rows_close(out, rows)
    slot_tokens = torch.tensor([count for _, counts in results for count in counts])
    per_expert = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    per_expert.index_add_(0, placement.physical_to_logical[0], slot_tokens)
    assert per_expert.tolist() == (2 * expert_tokens).tolist()  # once per mode


def _run_halves(info: RankInfo, placement: Placement) -> list[list[torch.Tensor]]:
    """Two micro-batches one after another, then in turns."""
    layer = _make_layer(placement, info.rank, info.group)
    halves = [_tokens(info.rank, 6), _tokens(info.rank + 10, 4)]
    counts = [6, 4]

    def forwards():
        pairs = zip(halves, counts, strict=True)
        return [_forward(layer, x, n, Mode.LOW_LATENCY) for x, n in pairs]

    alone = [overlap.run([forward])[0] for forward in forwards()]
    in_turns = overlap.run(forwards())
    return [[out[:n] for out, n in zip(outs, counts, strict=True)] for outs in (alone, in_turns)]


def test_two_micro_batches_in_turns_give_the_same_bits(rank_pool: RankPool):
    for alone, in_turns in rank_pool.run(_run_halves, 2, PLACEMENTS["two ranks"]):
        for one, other in zip(alone, in_turns, strict=True):
            assert_bits_equal(other, one)


def test_progress_tells_where_the_layer_stands():
    layer = _make_layer(PLACEMENTS["one rank"], 0, None)
    heard = []
    progress = Progress(listener=lambda now: heard.append((now.layer, now.stage)))
    track = Track(progress)
    track.layer = 7
    for _ in _forward(layer, _tokens(0, 3), 3, Mode.NORMAL, track):
        progress.enter(Stage.HEAD, layer=99)  # another micro-batch is elsewhere
    assert heard == [
        (7, Stage.GATE),
        (7, Stage.DISPATCH_SEND),
        (99, Stage.HEAD),
        (7, Stage.SHARED_EXPERT),
        (7, Stage.DISPATCH_WAIT),
        (7, Stage.EXPERTS),
        (7, Stage.COMBINE_SEND),
        (99, Stage.HEAD),
        (7, Stage.COMBINE_WAIT),
        (7, Stage.NORMS),
    ]
    assert progress.describe() == "step 0, layer 7, stage norms and glue, 0 tokens"


def test_without_a_shared_expert_only_the_routed_part_remains():
    layer = _make_layer(PLACEMENTS["one rank"], 0, None)
    x = _tokens(0, 5, 0)
    with_shared = overlap.run([_forward(layer, x, 5, Mode.NORMAL)])[0]
    layer.shared_expert = None
    routed = overlap.run([_forward(layer, x, 5, Mode.NORMAL)])[0]
    assert_rows_close(routed + _weights().shared_expert(x), with_shared)


def test_the_parts_of_attention_are_stages_of_the_step():
    assert set(Part) <= set(Stage)

"""Rules of thumb that the model must give by itself, from data sheets and fitted parameters."""

from dataclasses import replace

import pytest
import torch

from launch.plan.cards import cards, fabrics
from launch.plan.exchange import Exchange, places_hit
from launch.plan.kernels import mla_decode_core, product
from launch.plan.layer import Batch, Deployment
from launch.plan.parameters import family
from launch.plan.step import step_time
from moe_ep.config import ModelConfig
from moe_ep.gate import Gate
from moe_ep.progress import Stage

MODEL = ModelConfig.from_path("deepseek-v3")
HOPPER = family("hopper")
IDEAL = HOPPER | {"mla_sm_tflops": 1e9, "mla_launch_us": 0.0}


def deployment(card: str, ep_size: int, **changes) -> Deployment:
    found = cards()[card]
    return Deployment(
        model=MODEL,
        card=found,
        fabric=fabrics()[found.fabric],
        ep_size=ep_size,
        num_slots=256 // ep_size,
        **changes,
    )


@pytest.mark.parametrize(("value_bytes", "operations"), [(2, 240), (1, 484)])
def test_operations_per_byte_of_absorbed_decode(value_bytes: int, operations: int):
    """The card whose ratio of compute to bandwidth makes both bounds equal has that ratio."""
    card = cards()["h800"]

    def core(flops: float, bandwidth: float) -> str:
        bent = replace(card, bf16_flops=flops, memory_bytes_per_s=bandwidth / 0.9)
        return mla_decode_core(
            bent, IDEAL,
            num_queries=128, context=100_000, num_heads=128, latent_dim=576, value_dim=512,
            cache_value_bytes=value_bytes,
        ).bound  # fmt: skip

    assert core(1e12 * operations * 0.97, 1e12) == "compute"
    assert core(1e12 * operations * 1.03, 1e12) == "memory"


def test_absorbed_scores_cost_more_than_expanded_ones():
    absorbed = MODEL.latent_dim + MODEL.kv_lora_rank
    expanded = MODEL.qk_head_dim + MODEL.v_head_dim
    assert absorbed / expanded == pytest.approx(3.4, rel=0.01)


def test_a_decode_expert_needs_about_300_tokens_to_leave_the_bound_of_reading_its_weights():
    """Peak over bandwidth, halved, is 295 rows on H100. A tile has 128 rows, so that 257 rows cost
    the arithmetic of 384: with ideal kernels the two times cross as soon as a third tile begins."""
    card = cards()["h100"]
    assert card.fp8_flops / card.memory_bytes_per_s / 2 == pytest.approx(295, abs=1)
    ideal = HOPPER | {"launch_us": 0.0, "gemm_prologue_k": 0.0, "gemm_sm_tflops": 1e9,
                      "gemm_memory": 1.0}  # fmt: skip

    def bound(rows: int) -> str:
        return product(card, ideal, m=rows, n=4096, k=7168, groups=64).bound

    assert [bound(rows) for rows in (64, 128, 256)] == ["memory"] * 3
    assert [bound(rows) for rows in (257, 320, 512)] == ["compute"] * 3


def exchange_over_computing(ep_size: int, tokens: int, context: int) -> float:
    layer = step_time(deployment("h800", ep_size), Batch("decode", tokens, context), HOPPER).layer
    exchange = layer[Stage.DISPATCH_WAIT].us + layer[Stage.COMBINE_WAIT].us
    return exchange / (sum(cost.us for cost in layer.values()) - exchange)


@pytest.mark.parametrize("ep_size", [64, 128])
def test_the_exchange_takes_as_long_as_computing_or_longer_from_ep_64_on(ep_size: int):
    """At 2K; with more context attention grows and the exchange does not, so that at 4K it takes
    256 tokens, and at 16K no batch is enough. At EP 32 the rule does not hold yet."""
    assert exchange_over_computing(ep_size, 128, 2048) > 1
    assert exchange_over_computing(ep_size, 256, 2048) > 1.2
    assert exchange_over_computing(ep_size, 256, 4096) > 0.9
    assert exchange_over_computing(ep_size, 256, 16384) < 0.6
    assert exchange_over_computing(32, 128, 2048) < 0.9


def test_exchange_and_computing_of_the_published_profile():
    """187 and 394 us of exchange, 569 us of everything else (H800, EP 128, 128 tokens, 4K): as long
    as each other. The profile's kernels ran beside an exchange, those here alone."""
    assert exchange_over_computing(128, 128, 4096) == pytest.approx((187 + 394) / 569, rel=0.15)


def test_overlap_pays_where_exchange_is_about_computing_and_loses_at_small_batch():
    """Published for 96 H100, of which 72 decode with 288 slots: 27 % less at 32 tokens, even
    between 64 and 128, 25 % more at 256 (2,785 over 2,222 tokens/s), 36 % more at 128 requests of 2
    tokens and 4,000 of context (2,194 over 1,616)."""

    def gain(tokens: int, context: int = 2000, queries: int = 1) -> float:
        batch = Batch("decode", tokens, context, queries)
        d = replace(deployment("h100", 64), ep_size=72, imbalance=1 / 0.81)
        plain, overlapped = (
            step_time(replace(d, overlap=overlap), batch, HOPPER).step_us
            for overlap in (False, True)
        )
        return plain / overlapped

    assert gain(32) == pytest.approx(1 - 0.27, rel=0.2)
    assert gain(32) < 0.9
    assert gain(64) == pytest.approx(1.0, abs=0.1)
    assert gain(128) > 1.1
    assert gain(256) == pytest.approx(2785 / 2222, rel=0.15)
    assert gain(256, 4000, 2) == pytest.approx(2194 / 1616, rel=0.15)


def test_two_micro_batches_hide_at_most_one_of_exchange_and_computing():
    d = deployment("h800", 128, overlap=True)
    step = step_time(d, Batch("decode", 256, 4096), HOPPER)
    us = {stage: cost.us for stage, cost in step.layer.items()}
    exchange = us[Stage.DISPATCH_WAIT] + us[Stage.COMBINE_WAIT]
    computing = sum(us.values()) - exchange
    assert step.layer_us >= max(exchange, computing) - 1e-6
    assert step.layer_us < exchange + computing


def routed(model: ModelConfig, num_tokens: int = 4000) -> torch.Tensor:
    """Experts that the engine's own router picks for even random scores, ``[T, K]``."""
    gate = Gate(
        weight=torch.eye(model.num_experts),
        bias=None,
        num_topk=model.num_experts_per_tok,
        n_group=model.n_group,
        topk_group=model.topk_group,
        scoring_func=model.scoring_func,
        topk_method=model.topk_method,
        norm_topk_prob=model.norm_topk_prob,
        routed_scaling_factor=1.0,
    )
    scores = torch.randn(num_tokens, model.num_experts, generator=torch.Generator().manual_seed(1))
    return gate(scores)[0]


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "deepseek-v2-lite"])
def test_normal_mode_crosses_as_often_as_the_routers_choices_do(name: str):
    """Shares of groups that do not fit into places were rounded: EP 48, six nodes, had 2.7 instead
    of 4.0, fewer than four nodes. What is left is the bias that ``places_hit`` owns up to."""
    model = ModelConfig.from_path(name)
    topk_idx = routed(model)
    counts = (1, 2, 3, 4, 6, 8, 12, 16, 18, 20, 32, 64, 128)
    for num_places in counts:
        places = topk_idx * num_places // model.num_experts
        is_hit = torch.zeros(len(places), num_places).scatter_(1, places, 1.0)
        truth = float(is_hit.sum(1).mean())
        assert 0.905 * truth < places_hit(model, num_places) < 1.005 * truth, num_places
    if model.n_group == 1:
        hits = [places_hit(model, num_places) for num_places in counts]
        assert hits == sorted(hits)


def test_bytes_of_a_low_latency_dispatch_are_rows_that_cross():
    """Every token's row to each of its experts, counted one by one over what it crosses."""
    num_tokens, ep_size, gpus = 128, 32, 8
    exchange = Exchange(cards()["h800"], fabrics()["ib-400"], MODEL, ep_size)
    ranks = routed(MODEL, num_tokens * 100) * ep_size // MODEL.num_experts
    crossing = int((ranks >= gpus).sum()) / 100  # of 128 tokens of rank 0, to other nodes
    row = 7168 + 4 * 56 + 16
    ideal = HOPPER | {"ll_dispatch_latency_us": 0.0, "ll_hop_us": 0.0, "ll_dispatch_fabric": 1.0}
    cost = exchange.low_latency(ideal, num_tokens, "dispatch")
    assert cost.bound == "fabric"
    assert cost.us == pytest.approx(crossing * row / 50e9 * 1e6, rel=0.01)


def test_low_latency_times_of_deepep_on_h800():
    exchange = Exchange(cards()["h800"], fabrics()["ib-400"], MODEL, 64)
    assert exchange.low_latency(HOPPER, 128, "dispatch").us == pytest.approx(173, rel=0.15)
    assert exchange.low_latency(HOPPER, 128, "combine").us == pytest.approx(314, rel=0.15)


@pytest.mark.parametrize("card", ["h100", "h200", "h20", "gb200"])
def test_more_work_never_takes_less_time(card: str):
    p = family(cards()[card].family)
    for ep_size in (8, 32, 128):
        d = deployment(card, ep_size)
        times = [step_time(d, Batch("decode", t, 4096), p).step_us for t in (1, 8, 64, 256, 504)]
        assert times == sorted(times)
    contexts = [step_time(d, Batch("decode", 64, c), p).step_us for c in (128, 4096, 65536)]
    assert contexts == sorted(contexts)

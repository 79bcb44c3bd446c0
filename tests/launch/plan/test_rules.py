"""Rules of thumb that the model must give by itself, from data sheets and fitted parameters."""

from dataclasses import replace

import pytest

from launch.plan.cards import cards, fabrics
from launch.plan.exchange import Exchange
from launch.plan.kernels import mla_decode_core, product
from launch.plan.layer import Batch, Deployment
from launch.plan.parameters import family
from launch.plan.step import step_time
from moe_ep.config import ModelConfig
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


def decode_us(card: str, ep_size: int, tokens: int, *, overlap: bool, context: int = 4096) -> float:
    d = deployment(card, ep_size, overlap=overlap)
    return step_time(d, Batch("decode", tokens, context), HOPPER).step_us


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
    """With ideal kernels the two times meet where the rows are operations per byte, halved."""
    card = cards()["h100"]
    ideal = HOPPER | {"launch_us": 0.0, "gemm_prologue_k": 0.0, "gemm_sm_tflops": 1e9,
                      "grouped_memory": 1.0}  # fmt: skip
    bounds = {
        rows: product(card, ideal, m=rows, n=4096, k=7168, groups=64).bound
        for rows in range(64, 1025, 64)
    }
    first = min(rows for rows, bound in bounds.items() if bound == "compute")
    assert 192 <= first <= 384


@pytest.mark.parametrize("ep_size", [64, 128])
def test_the_exchange_takes_as_long_as_computing_at_large_ep(ep_size: int):
    layer = step_time(deployment("h800", ep_size), Batch("decode", 128, 4096), HOPPER).layer
    exchange = layer[Stage.DISPATCH_WAIT].us + layer[Stage.COMBINE_WAIT].us
    computing = sum(cost.us for cost in layer.values()) - exchange
    assert exchange > 0.8 * computing
    assert exchange > sum(cost.us for s, cost in layer.items() if s in (Stage.EXPERTS, Stage.GATE))


def test_overlap_pays_at_large_batch_and_loses_at_small():
    """Published at EP72: -27 % at 32 tokens, even between 64 and 128, +25 to +36 % at 256."""

    def gain(tokens: int) -> float:
        return decode_us("h100", 64, tokens, overlap=False) / decode_us(
            "h100", 64, tokens, overlap=True
        )

    assert gain(16) < 1.0
    assert gain(256) > 1.2
    assert gain(16) < gain(64) < gain(256)


def test_two_micro_batches_hide_at_most_one_of_exchange_and_computing():
    d = deployment("h800", 128, overlap=True)
    step = step_time(d, Batch("decode", 256, 4096), HOPPER)
    us = {stage: cost.us for stage, cost in step.layer.items()}
    exchange = us[Stage.DISPATCH_WAIT] + us[Stage.COMBINE_WAIT]
    computing = sum(us.values()) - exchange
    assert step.layer_us >= max(exchange, computing) - 1e-6
    assert step.layer_us < exchange + computing


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

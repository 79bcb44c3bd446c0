"""Kernels on one GPU at DeepSeek-V3's sizes against float64, with the libraries' own tolerances.

``pytest tests/gpu``. ``tests/kernels``, ``tests/experts`` and ``tests/attention`` run the Triton
kernels on the GPU too where there is one, at small sizes and on the hard inputs; here are the sizes
that autotuning, tensor cores and 64-bit offsets see. ``tests/test_gpu_rehearsal.py`` runs the
checks of this file without a GPU.
"""

from collections.abc import Callable

import pytest
import torch

from attention import AttentionSpec, attention_problem, create_attention
from bench.gpu import decode, experts, prefill, routing
from bench.gpu.case import KernelCase, Sizes
from bench.gpu.parity import FP8_DIFF, assert_rows_agree, restored, restored_weight
from moe_ep import deep_gemm_library
from moe_ep.experts import ExpertSpec, create_experts
from moe_ep.fp8 import FP8, quantize_blocks, quantize_rows
from moe_ep.kernels import device_problem
from moe_ep.linear_fp8 import DeepGemmLinear, StoredWeight
from tests.attention.cases import make_case, make_spec, naive
from tests.compare import assert_rows_close
from tests.experts.cases import SlotInputs, kernel_reference, random_weights, valid_rows
from tests.experts.deep_gemm_cases import power_of_two_scales, restored_rows
from tests.kernels.cases import to_device

# Compilers run when a kernel is first used, once per configuration.
pytestmark = pytest.mark.timeout(600, method="thread")

BF16 = torch.bfloat16
V3 = Sizes()
RAGGED = [5, 0, 256, 1, 130, 64, 17, 129]  # rows of each slot
PREFILLS = [(6000, 500), (0, 5), (63, 130), (4096, 1)]  # cached and new tokens of each request
LENGTHS = [1, 63, 64, 65, 512, 513, 4095, 16384]
POISON_BYTES = 256 << 20
DECODE_RTOL = 4e-2  # of a row; folding, scores' weights and result are BF16, as in other backends

Maker = Callable[[torch.device], KernelCase]
TRITON_CASES: dict[str, Maker] = {
    "quantize": lambda device: experts.quantize_case(4099, V3, device),
    "swiglu_masked": lambda device: experts.swiglu_case(RAGGED, V3, device, is_masked=True),
    "swiglu_contiguous": lambda device: experts.swiglu_case(RAGGED, V3, device, is_masked=False),
    "route": lambda device: routing.route_case(4099, V3, device),
    "map_to_slots": lambda device: routing.map_to_slots_case(4099, V3, device),
    "place": lambda device: routing.permute_cases(4099, 32, V3, device)[0],
    "permute": lambda device: routing.permute_cases(4099, 32, V3, device)[1],
    "unpermute": lambda device: routing.permute_cases(4099, 32, V3, device)[2],
    "write_latent": lambda device: decode.write_latent_case(4099, V3, device),
}


def require_triton(device: torch.device) -> None:
    if (problem := device_problem(device, needs_fp8=True)) is not None:
        pytest.skip(problem)


def require_deep_gemm() -> None:
    if (problem := deep_gemm_library.find_problem()) is not None:
        pytest.skip(problem)


def require_attention(backend: str, spec: AttentionSpec) -> None:
    if (problem := attention_problem(backend, spec)) is not None:
        pytest.skip(problem)


def check_case(case: KernelCase, backend: str, device: torch.device) -> None:
    """One result over memory that held NaN."""
    torch.full((POISON_BYTES // 4 if device.type == "cuda" else 1,), torch.nan, device=device)
    case.check(case.calls[backend]())


def check_experts(backend: str, device: torch.device, sizes: Sizes, counts: list[int]) -> None:
    """The whole feed-forward network of every slot, in both layouts."""
    spec = ExpertSpec(
        len(counts), sizes.hidden, sizes.intermediate, dtype=BF16, is_fp8=True, device=device
    )
    bank = create_experts(backend, spec)
    is_packed = backend == "deep_gemm" and deep_gemm_library.DeepGemm().is_packed
    weights = [random_weights(spec, seed) for seed in range(len(counts))]
    if is_packed:  # SM100 multiplies powers of two; rows then get theirs from the experts
        weights = [power_of_two_scales(expert) for expert in weights]
    for slot, expert in enumerate(weights):
        bank.load_slot(slot, expert)
    inputs = SlotInputs.random(counts, sizes.hidden, BF16 if is_packed else FP8)
    alignment = max(bank.row_alignment, 128)
    capacity = -(-max(counts) // alignment) * alignment
    layouts = [inputs.contiguous(alignment), inputs.masked(capacity)]
    results = [valid_rows(bank(to_device(d)).cpu(), d) for d in layouts]
    for slot, expert in enumerate(weights):
        rows = restored_rows(inputs, slot, use_ue8m0=is_packed)
        want = kernel_reference(rows, expert, use_ue8m0=is_packed)
        for result in results:
            assert_rows_agree(result[slot], want, FP8_DIFF)


def check_linear(device: torch.device, num_tokens: int, width: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, depth, generator=generator) / depth**0.5
    stored = StoredWeight(*(t.to(device) for t in quantize_blocks(weight, use_ue8m0=True)))
    linear = DeepGemmLinear(stored, BF16)
    x = torch.randn(num_tokens, depth, generator=generator).to(device, BF16)
    rows = restored(*quantize_rows(x, use_ue8m0=linear.library.is_packed))
    assert stored.scale is not None
    want = rows @ restored_weight(stored.weight, stored.scale).T
    assert_rows_agree(linear(x), want, FP8_DIFF)


def ragged_query_spec(num_heads: int) -> AttentionSpec:
    return make_spec(
        BF16,
        num_heads=num_heads,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


def check_ragged_queries(backend: str, device: torch.device, spec: AttentionSpec) -> None:
    """One to four new tokens per request, none of which sees a later one, from expanded queries to
    values; cache positions of nobody are NaN."""
    case = make_case(spec, [(61, 4), (0, 2), (700, 1), (1500, 4), (63, 2)], 5)
    nope = spec.qk_nope_head_dim
    w_uk, w_uv = case.w_kv_b.float().split([nope, spec.v_head_dim], dim=1)
    absorbed = torch.einsum("tnp,npc->tnc", case.q[..., :nope].float(), w_uk)
    q = torch.cat([absorbed.to(BF16), case.q[..., nope:]], dim=-1)
    attention = create_attention(backend, spec, device=device)
    plan = attention.plan(case.batch)
    summed = attention.decode(q=q.to(device), cache=case.cache.to(device), plan=plan).cpu()
    got = torch.einsum("tnc,nvc->tnv", summed.float(), w_uv)
    assert_rows_close(got.double(), naive(case), rtol=DECODE_RTOL, atol=1e-3)


@pytest.mark.parametrize("name", TRITON_CASES)
def test_triton_kernel(one_gpu: torch.device, name: str) -> None:
    require_triton(one_gpu)
    check_case(TRITON_CASES[name](one_gpu), "triton", one_gpu)


@pytest.mark.parametrize(("width", "depth"), [(4096, 7168), (7168, 2048)], ids=["gate_up", "down"])
@pytest.mark.parametrize("is_masked", [True, False], ids=["masked", "contiguous"])
@pytest.mark.parametrize("backend", ["triton", "deep_gemm"])
def test_grouped_product(one_gpu: torch.device, backend, is_masked, width, depth) -> None:
    require_triton(one_gpu) if backend == "triton" else require_deep_gemm()
    case = experts.grouped_gemm_case(RAGGED, width, depth, one_gpu, is_masked=is_masked)
    check_case(case, backend, one_gpu)


@pytest.mark.parametrize("backend", ["triton", "deep_gemm"])
def test_experts(one_gpu: torch.device, backend: str) -> None:
    require_triton(one_gpu) if backend == "triton" else require_deep_gemm()
    check_experts(backend, one_gpu, V3, [3, 0, 130, 17])


@pytest.mark.parametrize("num_tokens", [1, 130])
def test_dense_product_of_deep_gemm(one_gpu: torch.device, num_tokens: int) -> None:
    require_deep_gemm()
    check_linear(one_gpu, num_tokens, 2112, 7168)


@pytest.mark.parametrize("num_heads", [1, 16, 128])
@pytest.mark.parametrize("backend", ["triton", "flash_mla"])
def test_mla_decode(one_gpu: torch.device, backend: str, num_heads: int) -> None:
    require_attention(backend, ragged_query_spec(num_heads))
    check_case(decode.mla_decode_case(LENGTHS, num_heads, V3, one_gpu), backend, one_gpu)


@pytest.mark.parametrize("num_heads", [1, 16, 128])
@pytest.mark.parametrize("way", ["triton", "torch"])
def test_mla_prefill(one_gpu: torch.device, way: str, num_heads: int) -> None:
    """Over three launches, beside the way of tile by tile."""
    require_attention("triton", ragged_query_spec(num_heads))
    check_case(prefill.mla_prefill_case(PREFILLS, num_heads, V3, one_gpu), way, one_gpu)


@pytest.mark.parametrize("backend", ["triton", "flash_mla"])
def test_mla_decode_of_several_query_tokens(one_gpu: torch.device, backend: str) -> None:
    spec = ragged_query_spec(16)
    require_attention(backend, spec)
    check_ragged_queries(backend, one_gpu, spec)

"""Compiles every kernel, with every configuration that a GPU would try, for Hopper, without one.

Run as a program, with the names of functions below, it prints one JSON object a line per compiled
kernel. Triton brings the whole tool chain down to machine code; only the launch needs a device. So
the launchers are called as always, with a driver that says "sm_90" and with launches that stop
after compiling.
"""

import json
import re
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from attention import AttentionBatch, AttentionSpec
from attention.decode_items import plan_items
from attention.gpu_prefill import plan_launches
from attention.triton_kernels import decode
from attention.triton_latent import write_latent
from attention.triton_prefill import run_prefill
from moe_ep.dispatch import ContiguousLayout, MaskedLayout
from moe_ep.fp8 import FP8, ScaleFormat
from moe_ep.gate import Gate
from moe_ep.kernels import permute
from moe_ep.kernels.grouped_gemm import grouped_gemm
from moe_ep.kernels.quantize import quantize_rows
from moe_ep.kernels.routing import map_to_slots, route
from moe_ep.kernels.swiglu import swiglu

BF16 = torch.bfloat16
SLOTS, TOKENS, TOPK, HIDDEN, INTERMEDIATE = 32, 64, 8, 7168, 2048
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Sm90:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> None:
        return None


def report(kernel: Any, name: str, arguments: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    ptx = kernel.asm["ptx"]
    facts = {
        "kernel": name,
        "config": {key: value for key, value in arguments.items() if isinstance(value, int | bool)},
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": kernel.metadata.shared,
        "has_wgmma": "wgmma.mma_async" in ptx,
        "has_fp8_wgmma": bool(re.search(r"wgmma\.mma_async\S*e4m3\.e4m3", ptx)),
        "has_async_copy": "cp.async" in ptx,
        "has_16_byte_load": bool(re.search(r"ld\.global\S*\.(v4\.b32|v2\.b64)", ptx)),
    }
    print(json.dumps(facts), flush=True)


def compile_instead_of_launching() -> None:
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        report(launch(self, *args, grid=grid, warmup=True, **kwargs), self.__name__, kwargs)

    def compile_all(self: Any, *args: Any, **kwargs: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    driver.set_active(Sm90())
    JITFunction.run = compile_only
    Autotuner.run = compile_all


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def grouped_gemms() -> None:
    layout = ContiguousLayout(torch.zeros(SLOTS, dtype=torch.int32), 128)
    rows, scales = empty(TOKENS, 1024, dtype=FP8), empty(TOKENS, 8, dtype=torch.float32)
    weight, weight_scales = empty(SLOTS, 512, 1024), empty(SLOTS, 4, 8, dtype=torch.float32)
    weight_fp8 = empty(SLOTS, 512, 1024, dtype=FP8)
    grouped_gemm(rows, weight_fp8, layout=layout, a_scales=scales, b_scales=weight_scales)
    grouped_gemm(empty(TOKENS, 1024), weight_fp8, layout=layout, b_scales=weight_scales)
    masked = MaskedLayout(torch.zeros(SLOTS, dtype=torch.int32))
    grouped_gemm(empty(SLOTS, 16, 1024), weight, layout=masked)


def rows() -> None:
    layout = MaskedLayout(torch.zeros(SLOTS, dtype=torch.int32))
    for scale_format in ScaleFormat:
        quantize_rows(empty(TOKENS, HIDDEN), scale_format=scale_format)
        for quantizes in (True, False):
            swiglu(
                empty(SLOTS, 16, 2 * INTERMEDIATE),
                layout=layout,
                intermediate=INTERMEDIATE,
                row_weights=None,
                quantizes=quantizes,
                scale_format=scale_format,
            )
    slots = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    places = permute.place_contiguous(slots, num_slots=SLOTS, alignment=128)
    permute.permute(empty(TOKENS, HIDDEN // 128, dtype=torch.float32), places, is_column_major=True)
    permuted = permute.permute(empty(TOKENS, HIDDEN), places)
    permute.unpermute(permuted, places, torch.zeros(TOKENS, TOPK))


def routing() -> None:
    gate = Gate(
        weight=torch.zeros(256, 16),
        bias=torch.zeros(256),
        num_topk=TOPK,
        n_group=8,
        topk_group=4,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    topk_idx, _ = route(torch.zeros(TOKENS, 256), gate)
    map_to_slots(
        topk_idx,
        torch.zeros(256, 64, dtype=torch.int64),
        is_padding=torch.zeros(TOKENS, dtype=torch.bool),
        expert_tokens=torch.zeros(256, dtype=torch.int64),
    )


def attention() -> None:
    spec = AttentionSpec(128, 512, 128, 64, 128, 0.1, BF16)
    batch = AttentionBatch(2, [1, 1], [600, 3], [array("i", range(10)), array("i", [10])], 2)
    cache = empty(11, 64, 1, 576)
    decode(empty(2, 128, 576), cache, plan_items(batch, torch.device("cpu")), spec)
    angles = empty(4, 32, dtype=torch.float32)
    write_latent(
        empty(4, 576),
        norm_weight=empty(512),
        norm_eps=1e-6,
        cos=angles,
        sin=angles,
        is_interleaved=True,
        slot_mapping=torch.zeros(4, dtype=torch.int64),
        cache=cache,
        q_rope=empty(4, 128, 192)[..., 128:],
    )


def prefills() -> None:
    """DeepSeek-V3's sizes, and GLM-4.7-Flash's, which fill the shared memory."""
    for nope, value in ((128, 128), (192, 256)):
        spec = AttentionSpec(4, 512, nope, 64, value, 0.1, BF16)
        batch = AttentionBatch(0, [8], [0], [array("i", [0])], 8)
        run_prefill(
            q=empty(8, 4, nope + 64),
            cache=empty(1, 64, 1, 576),
            w_kv_b=empty(4, nope + value, 512),
            launches=plan_launches(batch, torch.device("cpu")),
            spec=spec,
        )


if __name__ == "__main__":
    compile_instead_of_launching()
    for name in sys.argv[1:]:
        globals()[name]()

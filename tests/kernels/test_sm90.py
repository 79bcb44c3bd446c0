"""Every kernel compiles for Hopper and uses what makes Hopper fast; no GPU needed, none used."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 600  # of two processes that compile some forty kernels; 20 s on one idle core
pytestmark = pytest.mark.timeout(TIMEOUT_S)
SHARED_BYTES = 227 * 1024  # that one program may have
KERNELS = {
    "_add_starts",
    "_decode",
    "_grouped_gemm",
    "_map_to_slots",
    "_merge",
    "_permute",
    "_prefill",
    "_quantize",
    "_rank_tokens",
    "_route",
    "_starts",
    "_swiglu",
    "_unpermute",
    "_write_latent",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.kernels.sm90"]
    processes = [
        subprocess.Popen([*command, *names], env=env, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True)
        for names in (["grouped_gemms"], ["rows", "routing", "attention", "prefills"])
    ]
    try:
        found = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), [e[-3000:] for _, e in found]
    return [json.loads(line) for output, _ in found for line in output.splitlines()]


def of(compiled: list[dict[str, Any]], kernel: str) -> list[dict[str, Any]]:
    found = [facts for facts in compiled if facts["kernel"] == kernel]
    assert found, f"{kernel} was not compiled"
    return found


def test_every_kernel_compiles_and_fits(compiled):
    assert {facts["kernel"] for facts in compiled} == KERNELS
    for facts in compiled:
        assert facts["shared"] <= SHARED_BYTES, facts
        # Bytes: a few spilled registers are the tuner's to judge, a kilobyte is a mistake.
        assert facts["stack"] < 1024, facts


def test_products_of_64_rows_use_the_tensor_cores_of_hopper(compiled):
    kernels = ("_grouped_gemm", "_decode", "_prefill")
    for facts in [facts for kernel in kernels for facts in of(compiled, kernel)]:
        rows = facts["config"].get("BLOCK_M") or facts["config"]["BLOCK_ROWS"]
        assert facts["has_wgmma"] == (rows >= 64), facts
        assert facts["has_async_copy"], facts
    both_fp8 = [facts for facts in compiled if facts["has_fp8_wgmma"]]
    assert len(both_fp8) == len(of(compiled, "_grouped_gemm")) // 3 - 2  # not those of 16 and 32


@pytest.mark.parametrize("kernel", ["_quantize", "_swiglu", "_permute", "_unpermute", "_merge"])
def test_rows_are_read_16_bytes_at_a_time(compiled, kernel):
    for facts in of(compiled, kernel):
        is_wide = facts["config"].get("BLOCK", 128) >= 128  # not a row of scales
        assert facts["has_16_byte_load"] or not is_wide, facts

"""Settings of the process: they must take effect where the system offers them, and harm nowhere."""

import platform
import re
from pathlib import Path

import pytest
import torch

from moe_ep.engine.host import prepare_process, use_huge_pages
from tests.ranks import RankInfo, run_ranks


def _huge_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    match = re.search(r"AnonHugePages: +(\d+) kB", text)
    return 0 if match is None else int(match[1]) * 1024


def load_and_collapse(info: RankInfo) -> tuple[int, int, bool]:
    prepare_process(1)
    weights = [torch.full((256, 1024), float(i)) for i in range(64)]  # 64 pieces of 1 MiB
    before = _huge_bytes()
    use_huge_pages()
    return before, _huge_bytes(), all(bool((w == i).all()) for i, w in enumerate(weights))


def test_loaded_weights_move_into_huge_pages_unchanged():
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not offered.exists() or "[never]" in offered.read_text():
        pytest.skip("this kernel offers no huge pages")
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("this kernel cannot collapse pages on demand")
    ((before, after, is_unchanged),) = run_ranks(load_and_collapse, 1)  # in a fresh heap
    assert is_unchanged
    assert after - before >= 32 * 2**20, (before, after)

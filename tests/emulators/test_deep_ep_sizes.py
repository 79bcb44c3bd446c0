"""The stand-in for DeepEP has the library's figures: those that were measured with the library."""

import pytest

from tests.emulators.deep_ep import Buffer, Config
from tests.emulators.deep_ep.config import elastic_size_hint
from tests.emulators.deep_ep.expansion import group_ends


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ((128, 7168, 8, 256), 1_908_410_496),
        ((64, 7168, 16, 256), 954_206_336),
        ((128, 7168, 8, 288), 2_146_961_792),
        ((1, 7168, 2, 8), 466_304),
        ((128, 2048, 2, 64), 136_315_520),
    ],
)
def test_low_latency_sizes_are_those_measured(arguments, size):
    assert Buffer.get_low_latency_rdma_size_hint(*arguments) == size


def test_normal_mode_sizes_are_those_measured():
    nvl = {2: 83_927_552, 4: 167_854_976, 8: 335_709_824, 16: 377_673_984}
    for num_ranks, size in nvl.items():
        config = Buffer.get_dispatch_config(num_ranks)
        assert config.get_nvl_buffer_size_hint(14336, num_ranks) == size
    rdma = {16: 91_887_744, 32: 168_023_680}
    for num_ranks, size in rdma.items():
        config = Buffer.get_dispatch_config(num_ranks)
        assert config.get_rdma_buffer_size_hint(14336, num_ranks) == size
    assert Buffer.get_combine_config(16).get_rdma_buffer_size_hint(14336, 16) == 86_637_184
    assert Buffer.get_combine_config(8).get_rdma_buffer_size_hint(14336, 8) == 0


def test_configs_and_sm_counts_are_checked():
    with pytest.raises(RuntimeError, match="chunk sizes"):
        Config(20, 256, 256)
    with pytest.raises(RuntimeError, match="RDMA chunk sizes"):
        Config(20, 6, 256, 200, 100)
    with pytest.raises(AssertionError, match="Unsupported number of EP ranks: 6"):
        Buffer.get_dispatch_config(6)
    with pytest.raises(AssertionError, match="must be even"):
        Buffer.set_num_sms(5)


def test_trap_05_psum_has_two_meanings():
    for counts, ends, padded in (
        ([100, 122, 114], [100, 250, 370], [128, 256, 384]),
        ([0, 1, 128, 129], [0, 1, 256, 385], [0, 128, 256, 512]),
    ):
        assert group_ends(counts, 128, do_expand=True) == ends
        assert group_ends(counts, 128, do_expand=False) == padded


def test_elastic_sizes_are_whole_pages_of_the_larger_layout():
    sizes = {"num_ranks": 8, "num_max_tokens": 128, "hidden": 7168, "num_topk": 8}
    size = elastic_size_hint(**sizes, use_fp8_dispatch=False, allow_multiple_reduction=True)
    # 8 ranks x 128 tokens x (row 14336, lists and source 100 -> 128), in units of 2 MiB
    assert size == -(-8 * 128 * (14336 + 128) // (2 << 20)) * (2 << 20)

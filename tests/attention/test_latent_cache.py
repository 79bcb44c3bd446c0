"""The paged latent cache: layout, writing by slot, padding."""

import torch

from attention import LatentCache
from tests.compare import assert_bits_equal


def make_cache(dtype: torch.dtype = torch.float32) -> LatentCache:
    cache = LatentCache(num_layers=3, num_blocks=4, latent_dim=5, dtype=dtype)
    cache.tensor.fill_(torch.nan)
    return cache


def test_layout() -> None:
    cache = make_cache(torch.bfloat16)
    assert cache.tensor.shape == (3, 5, 64, 1, 5)
    assert cache.num_blocks == 4
    assert cache.layer(1).shape == (5, 64, 1, 5)
    assert cache.layer(1).data_ptr() == cache.tensor[1].data_ptr()
    total = 5 * LatentCache.bytes_per_block(num_layers=3, latent_dim=5, dtype=torch.bfloat16)
    assert total == cache.tensor.nbytes


def test_write_touches_its_slots_only() -> None:
    cache = make_cache()
    want = cache.tensor.clone()
    latent = torch.randn(3, 5)
    cache.write(2, torch.tensor([64 + 3, 255, 0]), latent)
    want[2, 1, 3, 0], want[2, 3, 63, 0], want[2, 0, 0, 0] = latent
    assert_bits_equal(cache.tensor, want)


def test_padding_is_stored_where_nobody_reads() -> None:
    cache = make_cache()
    want = cache.tensor.clone()
    latent = torch.full((4, 5), torch.nan)
    latent[1] = 7.0
    cache.write(0, torch.tensor([-1, 130, -1, -1]), latent)
    want[0, 2, 2, 0] = 7.0
    assert_bits_equal(cache.tensor[:, :-1], want[:, :-1])


def test_nothing_to_write() -> None:
    cache = make_cache()
    want = cache.tensor.clone()
    cache.write(0, torch.tensor([-1, -1]), torch.randn(2, 5))
    cache.write(1, torch.empty(0, dtype=torch.int64), torch.randn(0, 5))
    assert_bits_equal(cache.tensor[:, :-1], want[:, :-1])

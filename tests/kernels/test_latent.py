"""The fused write of latents against the engine's norm, rotary embedding and cache."""

import pytest
import torch

from attention import LatentCache
from moe_ep.model.norm import RMSNorm
from moe_ep.model.rope import RotaryEmbedding
from tests.compare import assert_bits_equal, assert_rows_close
from tests.kernels.cases import DEVICE, NAN, randn

RANK, ROPE, TOKENS = 48, 12, 7
# The norm's sum is taken in another order than torch's, which may move the last place of a float32,
# and now and then which BF16 is nearest: one step of 2^-8, in each of two roundings.
RTOL = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def expected(raw, weight, rope: RotaryEmbedding, cos, sin) -> torch.Tensor:
    compressed = RMSNorm(weight, 1e-6)(raw[:, :RANK])
    return torch.cat([compressed, rope.apply(raw[:, RANK:], cos, sin)], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_equals_norm_then_rotation_then_write(dtype, is_interleaved):
    from attention.triton_latent import write_latent

    rope = RotaryEmbedding(
        dim=ROPE, theta=1e4, interleave=is_interleaved, yarn=None, max_positions=500
    )
    wide = torch.full((TOKENS, RANK + ROPE + 4), NAN, dtype=dtype)  # rows with a stride
    raw = wide[:, : RANK + ROPE]
    raw.copy_(randn(TOKENS, RANK + ROPE).to(dtype))
    raw[[2, 6]] = NAN  # padding
    slots = torch.tensor([64, 3, -1, 191, 0, 65, -1])
    weight = (1 + 0.1 * randn(RANK, seed=1)).to(dtype)
    cos, sin = rope.cos_sin(torch.tensor([0, 5, 0, 499, 77, 1, 0]))
    cache = LatentCache(num_layers=2, num_blocks=3, latent_dim=RANK + ROPE, dtype=dtype)
    cache.tensor.fill_(5.0)
    stored = cache.tensor.clone().to(DEVICE)
    latent = write_latent(
        raw.to(DEVICE),
        norm_weight=weight.to(DEVICE),
        norm_eps=1e-6,
        cos=cos.to(DEVICE),
        sin=sin.to(DEVICE),
        is_interleaved=is_interleaved,
        slot_mapping=slots.to(DEVICE),
        cache=stored[1],
    ).cpu()
    real = slots >= 0
    want = expected(raw[real], weight, rope, cos[real], sin[real])
    assert_rows_close(latent[real].double(), want.double(), rtol=RTOL[dtype], atol=0.0)
    if dtype is torch.bfloat16:  # the roundings in between are made where the reference makes them
        assert (latent[real] != want).float().mean() < 0.02
    # The cache holds what was returned, at the slots, and nothing else was touched.
    cache.write(1, slots[real], latent[real])
    assert_bits_equal(stored.cpu(), cache.tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_queries_are_rotated_in_place(monkeypatch, dtype, is_interleaved):
    """Several programs of heads, the last one not full; nothing around the queries is touched, nor
    those of padding. Either side may fuse a product with the sum."""
    from attention import triton_latent

    monkeypatch.setattr(triton_latent, "BLOCK_HEADS", 4)
    rope = RotaryEmbedding(
        dim=ROPE, theta=1e4, interleave=is_interleaved, yarn=None, max_positions=500
    )
    q = randn(TOKENS, 6, 20 + ROPE).to(dtype)
    slots = torch.tensor([64, 3, -1, 191, 0, 65, -1])
    cos, sin = rope.cos_sin(torch.tensor([0, 5, 0, 499, 77, 1, 0]))
    got = q.clone().to(DEVICE)
    triton_latent.write_latent(
        randn(TOKENS, RANK + ROPE, seed=3).to(DEVICE, dtype),
        norm_weight=torch.ones(RANK, dtype=dtype, device=DEVICE),
        norm_eps=1e-6,
        cos=cos.to(DEVICE),
        sin=sin.to(DEVICE),
        is_interleaved=is_interleaved,
        slot_mapping=slots.to(DEVICE),
        cache=torch.zeros(3, 64, 1, RANK + ROPE, dtype=dtype, device=DEVICE),
        q_rope=got[..., 20:],
    )
    want = q.clone()
    real = slots >= 0
    want[real, :, 20:] = rope.apply(q[real][..., 20:], cos[real], sin[real])
    assert_bits_equal(got.cpu()[..., :20], q[..., :20])
    assert_bits_equal(got.cpu()[~real], q[~real])
    assert_rows_close(got.cpu(), want, rtol=1e-6 if dtype is torch.float32 else 2**-8)


def test_no_tokens():
    from attention.triton_latent import write_latent

    none = torch.empty(0, ROPE // 2, device=DEVICE)
    latent = write_latent(
        torch.empty(0, RANK + ROPE, device=DEVICE),
        norm_weight=torch.ones(RANK, device=DEVICE),
        norm_eps=1e-6,
        cos=none,
        sin=none,
        is_interleaved=True,
        slot_mapping=torch.empty(0, dtype=torch.int64, device=DEVICE),
        cache=torch.empty(1, 64, 1, RANK + ROPE, device=DEVICE),
    )
    assert latent.shape == (0, RANK + ROPE)

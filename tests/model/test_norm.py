"""RMSNorm against transformers' module."""

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from moe_ep.model.norm import RMSNorm


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    # The sum of squares has another order; a BF16 value on the edge may round the other way.
    [(torch.float32, 5e-7), (torch.bfloat16, 2**-7)],
)
@pytest.mark.parametrize("shape", [(0, 48), (7, 48), (3, 5, 48)])
def test_same_as_transformers(dtype: torch.dtype, rtol: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.rand(48).to(dtype)
    x = (torch.randn(shape) * 10 ** torch.linspace(-3, 3, 48)).to(dtype)
    got = RMSNorm(weight, 1e-6)(x)
    reference = DeepseekV3RMSNorm(48, eps=1e-6).to(dtype)
    reference.weight.data.copy_(weight)
    assert got.dtype == dtype
    torch.testing.assert_close(got, reference(x), rtol=rtol, atol=0.0)


def test_strided_input_is_left_alone() -> None:
    x = torch.randn(4, 96)
    before = x.clone()
    got = RMSNorm(torch.ones(32), 1e-6)(x[:, :32])
    assert torch.equal(x, before)
    torch.testing.assert_close(got.square().mean(-1), torch.ones(4), rtol=1e-4, atol=0.0)


def test_zero_row_gives_zeros() -> None:
    assert torch.equal(RMSNorm(torch.ones(8), 1e-6)(torch.zeros(1, 8)), torch.zeros(1, 8))

"""``Linear`` against float64 products, packed and plain."""

import gc
import weakref

import pytest
import torch

from attention import products
from moe_ep.linear import Linear
from tests.compare import assert_bits_equal, assert_rows_close

SIZES = [(1, 1), (7, 5), (64, 64), (300, 200), (96, 1024), (1024, 130)]  # N, K
ROWS = (1, 2, 3, 8, 17, 33, 130)


@pytest.fixture(params=["as the CPU can", "never packed", "without BF16"])
def packing(request, monkeypatch):
    if request.param == "never packed":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    if request.param == "without BF16":
        monkeypatch.setattr(products, "cpu_has_bf16", lambda: False)


def make(size: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size[0] + size[1])
    weight = torch.randn(size, generator=generator) / size[1] ** 0.5
    return weight.to(dtype), torch.randn(size[0], generator=generator).to(dtype)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_products_match_float64(size, dtype):
    weight, bias = make(size, dtype)
    x = torch.randn(max(ROWS), size[1]).to(dtype)
    exact = x.double() @ weight.double().t()
    plain, biased = Linear(weight, dtype), Linear(weight, dtype, bias)
    for num_rows in ROWS:
        y = plain(x[:num_rows])
        assert (y.dtype, y.shape) == (dtype, (num_rows, size[0]))
        assert_rows_close(y.double(), exact[:num_rows], dtype=dtype)
        expected = exact[:num_rows] + bias.double()
        assert_rows_close(biased(x[:num_rows]).double(), expected, dtype=dtype)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_leading_dimensions_strides_and_no_rows(dtype):
    weight, _ = make((24, 40), dtype)
    linear = Linear(weight, dtype)
    x = torch.randn(2, 3, 40).to(dtype)
    assert_rows_close(linear(x).double(), x.double() @ weight.double().t(), dtype=dtype)
    assert linear(x[0, 0]).shape == (24,)
    assert linear(x[:, :0]).shape == (2, 0, 24)
    columns = torch.full((5, 80), float("nan"), dtype=dtype)
    columns[:, 20:60] = x.view(-1, 40)[:5]
    rows = x.view(6, 40)
    assert_rows_close(linear(columns[:, 20:60]), linear(rows[:5].contiguous()))
    assert_rows_close(linear(rows.t().contiguous().t()), linear(rows))


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_converted_by_rounding_once(given, dtype):
    weight, bias = make((32, 48), given)
    x = torch.randn(4, 48).to(dtype)
    assert_bits_equal(
        Linear(weight, dtype, bias)(x), Linear(weight.to(dtype), dtype, bias.to(dtype))(x)
    )


def test_a_weight_may_be_a_transposed_view():
    weight, _ = make((40, 40), torch.bfloat16)
    x = torch.randn(4, 40).bfloat16()
    expected = Linear(weight.t().contiguous(), torch.bfloat16)(x)
    assert_bits_equal(Linear(weight.t(), torch.bfloat16)(x), expected)


def test_poisoned_rows_do_not_reach_their_neighbours():
    weight, _ = make((64, 96), torch.bfloat16)
    linear = Linear(weight, torch.bfloat16)
    x = torch.randn(9, 96).bfloat16()
    clean = linear(x)
    x[4] = float("nan")
    poisoned = linear(x)
    assert poisoned[4].isnan().all()
    for rows in (slice(0, 4), slice(5, 9)):
        assert_bits_equal(poisoned[rows], clean[rows])


def test_packing_keeps_no_second_copy():
    weight, _ = make((64, 96), torch.bfloat16)
    linear = Linear(weight, torch.bfloat16)
    if not linear.is_packed:
        pytest.skip("this PyTorch has no oneDNN, so weights stay as they are")
    dropped = weakref.ref(weight)
    del weight
    gc.collect()
    assert dropped() is None
    assert linear(torch.ones(1, 96).bfloat16()).isfinite().all()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda w: Linear(w, torch.float16), "dtype must be bfloat16 or float32"),
        (lambda w: Linear(w[0], torch.float32), r"weight must be \[N, K\]"),
        (lambda w: Linear(w.to(torch.float8_e4m3fn), torch.float32), "got torch.float8_e4m3fn"),
        (lambda w: Linear(w.int(), torch.float32), "got torch.int32"),
        (lambda w: Linear(w, torch.float32, w), r"bias must be \[N\]"),
        (lambda w: Linear(w, torch.float32, w[:3, 0]), "bias must have 4 elements, got 3"),
        (lambda w: Linear(w, torch.float32)(w[:, :5]), r"x must be torch.float32 \[..., 6\]"),
        (lambda w: Linear(w, torch.bfloat16)(w), "x must be torch.bfloat16"),
    ],
)
def test_wrong_arguments_are_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call(torch.ones(4, 6))

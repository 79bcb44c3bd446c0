"""Weight matrices ready to multiply: the one way a dense projection is stored and applied.

On CPUs a weight is kept in oneDNN's blocked order, made once, because a product with few rows is
then bound by reading the weight: 1.5 to 2 times the bandwidth of the row-major weight, which has to
be re-ordered on the fly in every call. In float32 it is also twice as fast as PyTorch's own choice
where the CPU is not Intel's. On CPUs without instructions for BF16, BF16 weights are kept, and
multiplied, as float32 (``attention.products``). Elsewhere the weight stays row-major. Rows of a
product do not see each other.
"""

import torch
import torch.nn.functional as F

from attention.products import product_dtype

_DTYPES = (torch.bfloat16, torch.float32)


class Linear:
    """``y = x @ weight.T + bias`` for ``weight [N, K]`` and, when there is one, ``bias [N]``."""

    def __init__(
        self, weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        """Convert to ``dtype`` (``bfloat16`` or ``float32``) and pack.

        weight: BF16, FP16, float32 or float64; an FP8 weight goes through
            ``moe_ep.fp8.dequantize_blocks`` first. Not modified; when packed, no reference to it
            is kept, so that dropping it leaves one copy alive.
        Raises ValueError for other dtypes and shapes.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be bfloat16 or float32, got {dtype}")
        _check_parameter("weight", weight, ("N", "K"))
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self._product_dtype = product_dtype(dtype, weight.device)
        weight = weight.detach().to(dtype).to(self._product_dtype).contiguous()
        self.is_packed = weight.is_cpu and torch.backends.mkldnn.is_available()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.is_packed else weight
        self._bias = None if bias is None else self._checked_bias(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: ``[..., K]`` in the layer's dtype, rows of any stride. Returns new ``[..., N]``.

        Raises ValueError for another dtype or width.
        """
        if x.dtype is not self.dtype or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x must be {self.dtype} [..., {self.in_features}], got {x.dtype} {list(x.shape)}"
            )
        x = x.to(self._product_dtype)
        if self.is_packed:
            y = torch.ops.mkldnn._linear_pointwise.default(
                x, self._weight, self._bias, "none", [], ""
            )
        else:
            y = F.linear(x, self._weight, self._bias)
        return y.to(self.dtype)

    @property
    def dense_weight(self) -> torch.Tensor:
        """The weight ``[N, K]`` in the layer's dtype, row-major; a copy when it is kept otherwise,
        else the weight itself. A layer made from it is the same, bit by bit."""
        return (self._weight.to_dense() if self.is_packed else self._weight).to(self.dtype)

    def _checked_bias(self, bias: torch.Tensor) -> torch.Tensor:
        _check_parameter("bias", bias, ("N",))
        if len(bias) != self.out_features:
            raise ValueError(f"bias must have {self.out_features} elements, got {len(bias)}")
        return bias.detach().to(self.dtype).to(self._product_dtype).contiguous()


def _check_parameter(name: str, tensor: torch.Tensor, dims: tuple[str, ...]) -> None:
    if tensor.dim() != len(dims):
        raise ValueError(f"{name} must be [{', '.join(dims)}], got shape {list(tensor.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"{name} must be BF16, FP16, float32 or float64, got {tensor.dtype}")

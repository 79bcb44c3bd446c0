"""Weight matrices ready to multiply: the one way a dense projection is stored and applied.

On CPUs a weight is kept in oneDNN's blocked order, made once, because a product with few rows is
then bound by reading the weight: 1.5 to 2 times the bandwidth of the row-major weight, which has to
be re-ordered on the fly in every call. In float32 it is also twice as fast as PyTorch's own choice
where the CPU is not Intel's. Elsewhere, and for BF16 on CPUs without instructions for it, the
weight stays row-major. Rows of a product do not see each other.
"""

import torch
import torch.nn.functional as F

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
        weight = weight.detach().to(dtype).contiguous()
        self.is_packed = _can_pack(weight.device, dtype)
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
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise.default(
                x, self._weight, self._bias, "none", [], ""
            )
        return F.linear(x, self._weight, self._bias)

    @property
    def dense_weight(self) -> torch.Tensor:
        """The weight ``[N, K]`` in the layer's dtype, row-major; a copy when it is packed, else the
        weight itself. A layer made from it is the same, bit by bit."""
        return self._weight.to_dense() if self.is_packed else self._weight

    def _checked_bias(self, bias: torch.Tensor) -> torch.Tensor:
        _check_parameter("bias", bias, ("N",))
        if len(bias) != self.out_features:
            raise ValueError(f"bias must have {self.out_features} elements, got {len(bias)}")
        return bias.detach().to(self.dtype).contiguous()


def _can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _check_parameter(name: str, tensor: torch.Tensor, dims: tuple[str, ...]) -> None:
    if tensor.dim() != len(dims):
        raise ValueError(f"{name} must be [{', '.join(dims)}], got shape {list(tensor.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"{name} must be BF16, FP16, float32 or float64, got {tensor.dtype}")

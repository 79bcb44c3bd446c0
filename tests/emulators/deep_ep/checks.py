"""How the stand-in refuses: as the library does, or earlier where the library would go wrong."""

from collections.abc import Iterable

import torch

from tests.emulators.unwritten import FP8


class DeviceTrapError(RuntimeError):
    """A device assert or a hang: the library ends the CUDA context, with no way to go on."""


def host_assert(condition: bool, text: str) -> None:
    """A check in the library's C++ code."""
    if not condition:
        raise RuntimeError(f"Assertion exception: {text}")


def device_assert(condition: bool, text: str) -> None:
    """A check in a kernel, or the end of a wait that would never come."""
    if not condition:
        raise DeviceTrapError(f"device trap: {text}")


def check_torch_deterministic() -> None:
    fills = getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009
    assert not (torch.are_deterministic_algorithms_enabled() and fills)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Iterable[torch.dtype],
    shape: tuple[int | None, ...],
    *,
    is_contiguous: bool = True,
) -> None:
    """``None`` in the shape allows any size."""
    host_assert(tensor.dtype in tuple(dtypes), f"{name}: dtype {tensor.dtype}")
    fits = len(shape) == tensor.dim() and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    host_assert(fits, f"{name}: shape {list(tensor.shape)}, {list(shape)} needed")
    if is_contiguous:
        host_assert(tensor.is_contiguous(), f"{name}: strides {tensor.stride()}")


def check_routing(topk_idx: torch.Tensor, num_experts: int) -> None:
    """The kernels use an expert id as an address; a repeated one takes a place twice or traps."""
    device_assert(
        bool(((topk_idx >= -1) & (topk_idx < num_experts)).all()), "expert id out of range"
    )
    ordered = topk_idx.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    device_assert(not bool(repeated.any()), "an expert occurs twice in a token's top-k")


def take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows[index]`` for every dtype: torch has no indexing of FP8 on a CPU."""
    if rows.dtype == FP8:
        return rows.view(torch.uint8)[index].view(FP8)
    return rows[index]


def put(target: torch.Tensor, index: torch.Tensor | slice, rows: torch.Tensor) -> None:
    """``target[index] = rows`` for every dtype."""
    if target.dtype == FP8:
        target.view(torch.uint8)[index] = rows.view(torch.uint8)
    else:
        target[index] = rows

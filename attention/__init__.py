"""Multi-head latent attention: contract, paged latent cache, backends and how one is chosen."""

import logging
from collections.abc import Callable

import torch

from attention.base import (
    BLOCK_SIZE,
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    AttentionSpec,
    StaticPlan,
)
from attention.latent_cache import LatentCache
from attention.mla import MLA

__all__ = [
    "BLOCK_SIZE",
    "MLA",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionPlan",
    "AttentionSpec",
    "LatentCache",
    "StaticPlan",
    "attention_backend_names",
    "attention_capture_problem",
    "attention_problem",
    "create_attention",
]

logger = logging.getLogger(__name__)


def _flash_mla() -> type[AttentionBackend]:
    from attention.flash_mla_attention import FlashMlaAttention

    return FlashMlaAttention


def _torch() -> type[AttentionBackend]:
    from attention.torch_attention import TorchAttention

    return TorchAttention


def _triton() -> type[AttentionBackend]:
    from attention.triton_attention import TritonAttention

    return TritonAttention


# In the order in which "auto" prefers them. An entry imports its libraries when called.
_BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "flash_mla": _flash_mla,
    "torch": _torch,
    "triton": _triton,
}


def attention_backend_names() -> tuple[str, ...]:
    """Names that ``create_attention`` knows besides ``auto``, the preferred one first."""
    return tuple(_BACKENDS)


def attention_problem(name: str, spec: AttentionSpec) -> str | None:
    """None when the named backend can serve the spec here, else the reason why not."""
    if name not in _BACKENDS:
        return "no such attention backend"
    try:
        backend = _BACKENDS[name]()
    except ImportError as error:
        return f"its library cannot be imported: {error}"
    return backend.supports(spec)


def attention_capture_problem(name: str) -> str | None:
    """None when decodes of the named backend can be captured as graphs, else why not."""
    return _BACKENDS[name]().capture_problem()


def create_attention(
    name: str, spec: AttentionSpec, *, device: torch.device | str = "cpu"
) -> AttentionBackend:
    """The named backend, or for ``auto`` the first that can serve the spec; logs which and why.

    Raises ValueError with the reason, and with every valid name or why it is not, when it cannot.
    """
    problems = {known: attention_problem(known, spec) for known in _BACKENDS}
    usable = [known for known, problem in problems.items() if problem is None]
    chosen = next(iter(usable), None) if name == "auto" else name
    if chosen not in usable:
        others = "; ".join(
            f"{known}: {problem or 'can be used'}" for known, problem in problems.items()
        )
        raise ValueError(f"attention backend {name!r} cannot be used here ({others})")
    reason = "asked for by name"
    if name == "auto":
        skipped = [f"{known}: {problem}" for known, problem in problems.items() if problem]
        reason = "; ".join(skipped) or "the first that serves this model"
    logger.info("attention backend %s (%s)", chosen, reason)
    return _BACKENDS[chosen]()(spec, device=device)

"""Grouped expert networks: contract, backends and how one is chosen. See ``base.py``."""

import logging
from collections.abc import Callable

from moe_ep.experts.base import Experts, ExpertSpec, ExpertWeights

__all__ = [
    "BACKENDS",
    "ExpertSpec",
    "ExpertWeights",
    "Experts",
    "create_experts",
    "resolve_backend",
]

logger = logging.getLogger(__name__)


def _deep_gemm() -> type[Experts]:
    from moe_ep.experts.deep_gemm_experts import DeepGemmExperts

    return DeepGemmExperts


def _torch() -> type[Experts]:
    from moe_ep.experts.torch_experts import TorchExperts

    return TorchExperts


def _triton() -> type[Experts]:
    from moe_ep.experts.triton_experts import TritonExperts

    return TritonExperts


# In the order in which "auto" tries them. An entry imports its libraries when called.
BACKENDS: dict[str, Callable[[], type[Experts]]] = {
    "deep_gemm": _deep_gemm,
    "torch": _torch,
    "triton": _triton,
}


def resolve_backend(name: str, spec: ExpertSpec) -> tuple[str, str]:
    """The backend that ``name`` ("auto" or one of BACKENDS) stands for, and the reason.

    Raises ValueError, with every backend and why it can or cannot work, for a name that is unknown
    or cannot serve the spec.
    """
    problems = {backend: _problem(backend, spec) for backend in BACKENDS}
    usable = [backend for backend, problem in problems.items() if problem is None]
    if name == "auto" and usable:
        passed = [f"{backend}: {problem}" for backend, problem in problems.items() if problem]
        return usable[0], "auto: " + ("; ".join(passed) or "the first that serves these experts")
    if name in usable:
        return name, "asked for"
    table = "\n".join(f"  {backend}: {why or 'works'}" for backend, why in problems.items())
    raise ValueError(
        f"moe_runner_backend: {name!r} given, which cannot work here; backends:\n{table}"
    )


def create_experts(name: str, spec: ExpertSpec) -> Experts:
    """Make the experts of one layer, all slots empty. Raises ValueError as ``resolve_backend``."""
    backend, reason = resolve_backend(name, spec)
    logger.debug("moe_runner_backend: %s (%s)", backend, reason)
    return BACKENDS[backend]()(spec)


def _problem(backend: str, spec: ExpertSpec) -> str | None:
    try:
        return BACKENDS[backend]().supports(spec)
    except ImportError as error:
        return f"its library cannot be imported: {error}"

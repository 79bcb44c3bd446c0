"""Dispatch and combine: how tokens reach their experts and come back. See ``base.py``."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from moe_ep.dispatch.base import (
    ContiguousLayout,
    Dispatched,
    Dispatcher,
    DispatchSpec,
    MaskedLayout,
    Mode,
    Pending,
    Ready,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "BACKENDS",
    "ContiguousLayout",
    "DispatchSpec",
    "Dispatched",
    "Dispatcher",
    "MaskedLayout",
    "Mode",
    "Pending",
    "Ready",
    "create_dispatcher",
    "resolve_backend",
]

logger = logging.getLogger(__name__)


def _local() -> type[Dispatcher]:
    from moe_ep.dispatch.local import LocalDispatcher

    return LocalDispatcher


def _deepep() -> type[Dispatcher]:
    from moe_ep.dispatch.deep_ep_v1 import DeepEpV1Dispatcher

    return DeepEpV1Dispatcher


def _deepep_v2() -> type[Dispatcher]:
    from moe_ep.dispatch.deep_ep_v2 import DeepEpV2Dispatcher

    return DeepEpV2Dispatcher


def _collective() -> type[Dispatcher]:
    from moe_ep.dispatch.collective import CollectiveDispatcher

    return CollectiveDispatcher


# In the order in which "auto" tries them.
BACKENDS: dict[str, Callable[[], type[Dispatcher]]] = {
    "local": _local,
    "deepep": _deepep,
    "deepep_v2": _deepep_v2,
    "collective": _collective,
}


def resolve_backend(name: str, spec: DispatchSpec) -> tuple[str, str]:
    """The backend that ``name`` ("auto" or one of BACKENDS) stands for, and the reason.

    Raises ValueError, with every backend and why it can or cannot work, for a name that is unknown
    or cannot serve the spec.
    """
    reasons = {backend: load().supports(spec) for backend, load in BACKENDS.items()}
    if name == "auto":
        for backend, reason in reasons.items():
            if reason is None:
                return backend, f"auto: the first that serves {spec.num_ranks} ranks"
    elif name in reasons and reasons[name] is None:
        return name, "asked for"
    table = "\n".join(f"  {backend}: {reason or 'works'}" for backend, reason in reasons.items())
    raise ValueError(f"moe_a2a_backend: {name!r} given, which cannot work here; backends:\n{table}")


def create_dispatcher(name: str, spec: DispatchSpec, group: "ProcessGroup | None") -> Dispatcher:
    """Make the dispatcher of this rank; logs the choice and its reason.

    group: all ranks of the engine, in rank order; None is allowed for the local backend only.
    Raises ValueError as ``resolve_backend`` does, and when a group is needed and not given.
    """
    backend, reason = resolve_backend(name, spec)
    logger.info("moe_a2a_backend: %s (%s)", backend, reason)
    return BACKENDS[backend]()(spec, group)

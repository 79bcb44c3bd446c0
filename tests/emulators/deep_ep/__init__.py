"""A stand-in for ``deep_ep`` 2.1.0 between CPU ranks over gloo, stricter than the library.

The names and signatures are the library's (held by ``tests/emulators/test_manifest.py``); only what
the adapters use works, the rest raises NotImplementedError. It refuses what the library refuses,
and what the library would silently get wrong; results hold NaN until their event or hook.
"""

from tests.emulators.deep_ep.checks import DeviceTrapError
from tests.emulators.deep_ep.config import Config, topk_idx_t
from tests.emulators.deep_ep.elastic import ElasticBuffer
from tests.emulators.deep_ep.event import EventHandle, EventOverlap
from tests.emulators.deep_ep.expansion import EPHandle
from tests.emulators.deep_ep.legacy import Buffer

__version__ = "2.1.0"

__all__ = [
    "Buffer",
    "Config",
    "DeviceTrapError",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "topk_idx_t",
]

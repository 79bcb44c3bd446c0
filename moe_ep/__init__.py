"""Expert-parallel inference for MLA mixture-of-experts models.

``from moe_ep import LLM, SamplingParams`` is all a script needs; both load on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.llm import LLM
    from moe_ep.engine.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "launch.llm", "SamplingParams": "moe_ep.engine.request"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)

"""How a field of a config says what it is to the command line and the docs."""

import dataclasses
from collections.abc import Sequence
from typing import Any


def flag(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    scope: str | None = None,
    sglang: str | None = None,
    vllm: str | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A field of ``EngineConfig`` with what the command line and the docs say about it.

    help: one sentence without its scope. scope: ``per rank`` or ``total`` for counts. sglang, vllm:
    the equivalent flag there, None when there is none. choices: the valid names.
    """
    names = tuple(choices) if choices else None
    metadata = {"help": help, "scope": scope, "sglang": sglang, "vllm": vllm, "choices": names}
    return dataclasses.field(default=default, metadata=metadata)

"""Weights of a checkpoint directory, each rank reading only its share.

Everything that can be known from the files' headers (names, shapes, dtypes, scales) is checked
against the config before the first tensor is read, so that a start that cannot succeed fails at
once, with all that is wrong.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moe_ep.config import ModelConfig
from moe_ep.fp8 import num_blocks
from moe_ep.model.checkpoint import Checkpoint, LoadError
from moe_ep.model.tensor_names import (
    LANGUAGE_PREFIX,
    SCALE_SUFFIXES,
    Shape,
    canonical,
    expected_tensors,
    expert_of,
    ignored_because,
)
from moe_ep.model.weights import DummySource, LoadReport, WeightSource

__all__ = [
    "CheckpointSource",
    "DummySource",
    "LoadError",
    "LoadReport",
    "WeightSource",
    "expected_tensors",
    "progress_bar",
]

_FP8 = "F8_E4M3"
_WIDE = ("BF16", "F16", "F32")


class CheckpointSource(WeightSource):
    """Weights from a directory of safetensors files.

    Raises LoadError, before any tensor is read, with every file problem, or else with every tensor
    that is missing, of the wrong shape or dtype, or FP8 without a scale.

    on_bytes: called with the number of bytes after each read, when set.
    """

    def __init__(self, directory: str | Path, model: ModelConfig) -> None:
        self.checkpoint = Checkpoint(directory)
        self._model = model
        self._stored = canonical(set(self.checkpoint.entries))
        self._expected = expected_tensors(model)
        self._loaded: set[str] = set()
        self.on_bytes: Callable[[int], None] | None = None
        problems = [
            why for name, shape in self._expected.items() for why in self._check(name, shape)
        ]
        if problems:
            raise LoadError(directory, problems)

    def has(self, name: str) -> bool:
        return name in self._stored

    def raw(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if name not in self._stored:
            raise LoadError(self.checkpoint.directory, [f"tensor {name} is missing"])
        scale_name = self._scale_of(name)
        weight = self._read(name)
        return weight, None if scale_name is None else self._read(scale_name).float()

    def num_bytes(self, experts: list[list[int]]) -> int:
        """Bytes that loading reads on a rank with these logical experts per MoE layer."""
        first = self._model.first_k_dense_replace
        local = {(first + i, expert) for i, layer in enumerate(experts) for expert in layer}
        wanted = [n for n in self._expected if expert_of(n) is None or expert_of(n) in local]
        names = [*wanted, *filter(None, map(self._scale_of, wanted))]
        return sum(self.checkpoint.entries[self._stored[name]].num_bytes for name in names)

    def report(self) -> LoadReport:
        is_multimodal = any(name.startswith(LANGUAGE_PREFIX) for name in self.checkpoint.entries)
        scales = {self._scale_of(name) for name in self._expected}
        ignored: dict[str, str] = {}
        other_ranks, unexpected = [], []
        for name, stored in self._stored.items():
            if name in self._loaded:
                continue
            if why := ignored_because(name, stored, self._model, is_multimodal):
                ignored[stored] = why
            elif name not in self._expected and name not in scales:
                unexpected.append(stored)
            elif expert_of(name) is not None:
                other_ranks.append(stored)
        needed = [name for name in self._expected if expert_of(name) is None]
        return LoadReport(
            loaded=tuple(self._stored[name] for name in sorted(self._loaded)),
            other_ranks=tuple(other_ranks),
            ignored=ignored,
            unexpected=tuple(unexpected),
            missing=tuple(name for name in needed if name not in self._loaded),
            bytes_read=self.checkpoint.bytes_read,
            total_bytes=self.checkpoint.total_bytes,
        )

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.checkpoint.read(self._stored[name])
        self._loaded.add(name)
        if self.on_bytes is not None:
            self.on_bytes(tensor.nbytes)
        return tensor

    def _dtype_of(self, name: str) -> str:
        return self.checkpoint.entries[self._stored[name]].dtype

    def _shape_of(self, name: str) -> Shape:
        return self.checkpoint.entries[self._stored[name]].shape

    def _scale_of(self, name: str) -> str | None:
        """Name of an FP8 weight's scales; None for other tensors and for a missing scale."""
        if self._dtype_of(name) != _FP8:
            return None
        return next((name + end for end in SCALE_SUFFIXES if name + end in self._stored), None)

    def _check(self, name: str, shape: Shape) -> list[str]:
        """What is wrong with a tensor of the model, as the files' headers tell."""
        if name not in self._stored:
            return [f"tensor {name} is missing"]
        dtype, found, problems = self._dtype_of(name), self._shape_of(name), []
        if found != shape:
            problems.append(
                f"tensor {name} has shape {list(found)}, the config asks for {list(shape)}"
            )
        if dtype == _FP8:
            problems += self._check_fp8(name, found)
        elif dtype not in _WIDE:
            problems.append(
                f"tensor {name} has dtype {dtype}, not one of {_FP8}, {', '.join(_WIDE)}"
            )
        elif self._model.quantization and expert_of(name) is not None:
            problems.append(f"tensor {name} has dtype {dtype}, but the config says fp8")
        return problems

    def _check_fp8(self, name: str, shape: Shape) -> list[str]:
        if self._model.quantization is None:
            return [f"tensor {name} is FP8, but the config has no quantization_config"]
        scale_name = self._scale_of(name)
        if scale_name is None:
            return [f"tensor {name} is FP8 and has no scale ({name}{SCALE_SUFFIXES[0]})"]
        expected = tuple(num_blocks(size) for size in shape)
        found = self._shape_of(scale_name)
        if found == expected and self._dtype_of(scale_name) in _WIDE:
            return []
        return [
            f"tensor {scale_name} is {self._dtype_of(scale_name)} {list(found)},"
            f" scales per 128x128 block of {name} are floating point {list(expected)}"
        ]


@contextmanager
def progress_bar(
    source: CheckpointSource, experts: list[list[int]], *, is_shown: bool
) -> Iterator[None]:
    """Show the bytes read while the block loads, if wanted and if stderr is a terminal.

    experts: the logical experts of this rank, per MoE layer.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("loading weights"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=source.num_bytes(experts))
        source.on_bytes = lambda count: bar.advance(task, count)
        try:
            yield
        finally:
            source.on_bytes = None

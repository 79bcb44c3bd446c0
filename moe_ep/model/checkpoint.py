"""A directory of safetensors files as one table of tensors, each read by itself.

Only headers are read up front. A tensor is then read with positioned reads of exactly its bytes:
a memory map would be shorter, but it hides how much is read, is slow over network file systems,
and kills the process when a file shrinks. Nothing is known here of models, ranks or FP8.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INDEX_FILE = "model.safetensors.index.json"
_MAX_SHOWN = 50
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit; more means a file of another kind
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class LoadError(ValueError):
    """A checkpoint that cannot be loaded, with everything that is wrong with it.

    problems: all of them; the message shows the first of a long list and counts the others.
    """

    def __init__(self, source: object, problems: Sequence[str]) -> None:
        self.source = str(source)
        self.problems = tuple(problems)
        shown = list(self.problems[:_MAX_SHOWN])
        if hidden := len(self.problems) - len(shown):
            shown.append(f"and {hidden} more")
        super().__init__("\n  - ".join([f"{source} cannot be loaded:", *shown]))

    def __reduce__(self) -> tuple[type["LoadError"], tuple[str, tuple[str, ...]]]:
        # The default rebuilds from the message; ranks and launcher are different processes.
        return (LoadError, (self.source, self.problems))


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. dtype: the name in the file's header. start: byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class Checkpoint:
    """The tensors of a directory, by the names in its files.

    The files are those of ``model.safetensors.index.json`` if there is one, else all
    ``*.safetensors``. LoadError lists every absent, cut-off or unreadable file, every tensor that
    the index promises and its file lacks, and every tensor that is there twice.

    bytes_read: tensor bytes read so far, headers not counted.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.entries: dict[str, TensorEntry] = {}
        self.bytes_read = 0
        problems: list[str] = []
        promised = self._read_index(problems)
        files = sorted({self.directory / name for name in promised.values()})
        files = files or sorted(self.directory.glob("*.safetensors"))
        if not files and not problems:
            problems.append("no *.safetensors file in it")
        held = [self._read_file(file, problems) for file in files]
        names = Counter(name for entries in held for name in entries)
        problems += [f"tensor {name} is in {n} files" for name, n in names.items() if n > 1]
        for entries in held:
            self.entries |= entries
        if not problems:  # an unreadable file would repeat itself here for each of its tensors
            problems += [
                f"the index promises {name} in {file}, which lacks it"
                for name, file in promised.items()
                if name not in self.entries or self.entries[name].file.name != file
            ]
        if problems:
            raise LoadError(self.directory, problems)

    @property
    def total_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A new tensor with the values of ``name``, or of some consecutive rows of it.

        rows: a slice of the first dimension without a step; only its bytes are read. KeyError for
        an unknown name, LoadError when the dtype is unknown or the file has become shorter.
        """
        entry = self.entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise LoadError(entry.file, [f"tensor {name} has the unknown dtype {entry.dtype}"])
        shape, start, num_bytes = entry.shape, entry.start, entry.num_bytes
        if rows is not None:
            first, last, step = rows.indices(shape[0])
            if step != 1:
                raise ValueError(f"rows of {name} must have no step, got {step}")
            row_bytes = num_bytes // max(shape[0], 1)
            shape = (max(last - first, 0), *shape[1:])
            start, num_bytes = start + first * row_bytes, shape[0] * row_bytes
        data = torch.empty(num_bytes, dtype=torch.uint8)
        _read_into(entry.file, data, start)
        self.bytes_read += num_bytes
        return data.view(dtype).view(shape)

    def _read_index(self, problems: list[str]) -> dict[str, str]:
        """File of each tensor as the index says; empty without an index."""
        path = self.directory / INDEX_FILE
        if not path.exists():
            return {}
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{INDEX_FILE} is not an index with a weight_map ({error!r})")
            return {}

    def _read_file(self, file: Path, problems: list[str]) -> dict[str, TensorEntry]:
        try:
            return _read_header(file)
        except FileNotFoundError:
            problems.append(f"file {file.name} is missing")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"file {file.name}: {error}")
        return {}


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Entries of one file: 8 bytes of header length, a JSON header, then the tensors' bytes.

    ValueError when the file is not of this form or does not have the length it promises.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError("not a safetensors file, or cut off within its header")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    data_start = 8 + length
    entries = {
        name: TensorEntry(
            file=file,
            dtype=info["dtype"],
            shape=tuple(info["shape"]),
            start=data_start + info["data_offsets"][0],
            num_bytes=info["data_offsets"][1] - info["data_offsets"][0],
        )
        for name, info in header.items()
    }
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=data_start)
    if end != size:
        raise ValueError(f"has {size} bytes, its header promises {end}: cut off or corrupt")
    for name, entry in entries.items():
        _check_extent(name, entry)
    return entries


def _check_extent(name: str, entry: TensorEntry) -> None:
    dtype = _DTYPES.get(entry.dtype)
    count = torch.Size(entry.shape).numel()
    if entry.num_bytes < 0 or (dtype is not None and count * dtype.itemsize != entry.num_bytes):
        raise ValueError(
            f"tensor {name} of shape {list(entry.shape)} and dtype {entry.dtype} is given"
            f" {entry.num_bytes} bytes"
        )


def _read_into(file: Path, data: torch.Tensor, start: int) -> None:
    """Fill ``data`` (uint8, one dimension) from the file's byte ``start`` on."""
    view: memoryview = data.numpy().data
    with file.open("rb", buffering=0) as stream:
        done = 0
        while done < len(view):  # one call returns at most 2 GiB
            count = os.preadv(stream.fileno(), [view[done:]], start + done)
            if count == 0:
                raise LoadError(file, [f"it ends at byte {start + done}, and ended later before"])
            done += count

"""Files of loads and of placements, in the forms that SGLang reads and writes.

A file is one dictionary, in JSON (``.json``) or as ``torch.save`` leaves it (``.pt``), and its key
tells what it is: ``logical_count`` (tokens of each expert, ``[layers, experts]`` or with a leading
dimension of steps; written by the expert distribution recorder in mode ``stat``) or
``physical_to_logical_map`` (``[layers, slots]``). SGLang counts layers over the whole model, so the
first rows of its files may belong to dense layers and mean nothing.
"""

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eplb.loads import SlotRecords
from eplb.placement import Placement

LOADS, PLACEMENT = "logical_count", "physical_to_logical_map"


class FileError(ValueError):
    """A file that cannot be used; the message names it, what it has and what is needed."""


class ModelLayers(NamedTuple):
    """What a file must fit: layers with experts, dense ones before them, experts per layer."""

    num_moe: int
    num_dense: int
    num_experts: int


def read_file(path: str | Path) -> tuple[str, torch.Tensor]:
    """What the file holds: ``LOADS`` with float64 ``[W, layers, E]``, or ``PLACEMENT`` with int64
    ``[layers, P]``. Raises FileError."""
    content = _read(Path(path))
    keys = [key for key in (LOADS, PLACEMENT) if isinstance(content, dict) and key in content]
    if len(keys) != 1:
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise FileError(f"{path}: {found} found, one of {LOADS} and {PLACEMENT} needed")
    values = _tensor(path, keys[0], content[keys[0]])
    if keys[0] == PLACEMENT:
        return PLACEMENT, _checked_table(path, values)
    return LOADS, _checked_loads(path, values)


def read_loads(path: str | Path, layers: ModelLayers | None = None) -> torch.Tensor:
    """Tokens of each expert, float64 ``[W, L, E]``, of a file of loads.

    layers: what the file must fit; rows of dense layers are then dropped. Without it the rows are
    returned as they are. Raises FileError.
    """
    kind, loads = read_file(path)
    if kind != LOADS:
        raise FileError(f"{path}: {kind} found, {LOADS} needed")
    return loads if layers is None else fit_loads(path, loads, layers)


def fit_loads(path: str | Path, loads: torch.Tensor, layers: ModelLayers) -> torch.Tensor:
    """The rows of the model's MoE layers; FileError when the loads are of another model."""
    if loads.shape[-1] != layers.num_experts:
        raise FileError(
            f"{path}: loads of {loads.shape[-1]} experts found, the model has {layers.num_experts}"
        )
    return _moe_rows(path, loads, layers)


def write_loads(path: str | Path, loads: torch.Tensor, *, num_dense: int = 0) -> None:
    """loads: ``[W, L, E]``. num_dense: rows of zeros put before the first layer, as SGLang has."""
    counts = torch.nn.functional.pad(loads, (0, 0, num_dense, 0))
    _write(Path(path), {"rank": 0, LOADS: counts, "average_utilization_rate_over_window": None})


def write_passes(path: str | Path, records: SlotRecords, placement: Placement) -> None:
    """What one rank recorded, step by step, as SGLang's mode ``per_pass`` writes it (a ``.pt``).

    placement: ``last_physical_to_logical_map``, with a row per MoE layer only.
    """
    passes = [
        {
            "forward_pass_id": step,
            "rank": records.rank,
            "gatherer_key": "primary",
            "global_physical_count": _among_all(counts, records.rank, placement.num_ranks),
        }
        for step, counts in zip(records.steps, records.counts, strict=True)
    ]
    table = placement.physical_to_logical
    _write(Path(path), {"records": passes, "last_physical_to_logical_map": table})


def fit_placement(
    path: str | Path, table: torch.Tensor, layers: ModelLayers, *, num_slots: int, num_ranks: int
) -> Placement:
    """The placement of the model's MoE layers; FileError when it is one of another model, of other
    ranks or no placement at all."""
    if table.shape[1] != num_slots:
        raise FileError(
            f"{path}: {table.shape[1]} slots per layer found, {num_slots} needed:"
            f" {layers.num_experts} experts and {num_slots - layers.num_experts} redundant ones"
        )
    rows = _moe_rows(path, table, layers)
    try:
        return Placement(rows, layers.num_experts, num_ranks)
    except ValueError as error:
        raise FileError(f"{path}: {error}") from error


def write_placement(path: str | Path, placement: Placement, *, num_dense: int = 0) -> None:
    """num_dense: rows put before the first layer (copies of it; they mean nothing)."""
    table = placement.physical_to_logical
    _write(Path(path), {PLACEMENT: torch.cat([table[:1].expand(num_dense, -1), table])})


def _among_all(counts: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """``[L, P]`` with the counts ``[L, S]`` of one rank, and zeros."""
    everywhere = torch.zeros(len(counts), num_ranks, counts.shape[1], dtype=counts.dtype)
    everywhere[:, rank] = counts
    return everywhere.flatten(1)


def _moe_rows(path: str | Path, values: torch.Tensor, layers: ModelLayers) -> torch.Tensor:
    """Drop the rows of dense layers from ``[..., layers, n]``."""
    found = values.shape[-2]
    if found == layers.num_moe:
        return values
    if found == layers.num_moe + layers.num_dense:
        return values[..., layers.num_dense :, :]
    with_dense = f" or {layers.num_moe + layers.num_dense} with dense ones" * bool(layers.num_dense)
    raise FileError(
        f"{path}: {found} layers found, the model has {layers.num_moe} with experts{with_dense}"
    )


def _checked_table(path: str | Path, values: torch.Tensor) -> torch.Tensor:
    if values.dim() != 2 or not values.numel() or values.is_floating_point():
        raise FileError(
            f"{path}: {PLACEMENT} of {values.dtype} {list(values.shape)} found,"
            " integers [layers, slots] needed"
        )
    return values.long()


def _checked_loads(path: str | Path, values: torch.Tensor) -> torch.Tensor:
    if values.dim() not in (2, 3) or not values.numel():
        raise FileError(
            f"{path}: {LOADS} of shape {list(values.shape)} found,"
            " [layers, experts] or [steps, layers, experts] needed"
        )
    loads = values.double()
    if not bool(torch.isfinite(loads).all()) or bool((loads < 0).any()):
        raise FileError(f"{path}: {LOADS} has values that are negative or not finite")
    return loads if loads.dim() == 3 else loads.unsqueeze(0)


def _tensor(path: str | Path, key: str, values: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:  # rows of unequal length, text
        raise FileError(f"{path}: {key} is not an array of numbers: {error}") from error


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise FileError(f"{path}: not a {path.suffix} file: {error}") from error
    raise FileError(f"{path}: {path.suffix or 'no suffix'} given, .json or .pt needed")


def _write(path: Path, content: dict[str, Any]) -> None:
    if path.suffix == ".pt":
        torch.save(content, path)
    elif path.suffix == ".json":
        plain = {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in content.items()
        }
        path.write_text(json.dumps(plain), encoding="utf-8")
    else:
        raise FileError(f"{path}: {path.suffix or 'no suffix'} given, .json or .pt needed")

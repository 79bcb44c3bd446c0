"""What a call to dispatch must satisfy, and the plan of who gets which token: plain functions.

Shape letters: T tokens on this rank, K choices per token, R ranks, S slots per rank, H hidden.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup

from moe_ep.dispatch.base import Dispatched, DispatchSpec, Mode
from moe_ep.fp8 import FP8

PAYLOAD_DTYPES = (FP8, torch.bfloat16, torch.float32)
OUT_DTYPES = (torch.bfloat16, torch.float32)


class Choices(NamedTuple):
    """The valid choices of a rank's tokens in (token, k) order.

    tokens, slots: int64 ``[n]``, slots global. weights: float32 ``[n]``.
    """

    tokens: np.ndarray
    slots: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class SendPlan:
    """One row per (rank, token) pair, ordered by rank, then token.

    row_tokens: int64 ``[N]``, the token of each row. row_counts, entry_counts: int64 ``[R]``, rows
    and entries for each rank. Entries are ordered by row, then k: entry_rows int64 ``[n]`` counts
    rows from the first row for the same rank, entry_slots int64 ``[n]`` are 0 to S - 1,
    entry_weights float32 ``[n]``.
    """

    num_tokens: int
    row_tokens: np.ndarray
    row_counts: np.ndarray
    entry_counts: np.ndarray
    entry_rows: np.ndarray
    entry_slots: np.ndarray
    entry_weights: np.ndarray


def spec_problem(spec: DispatchSpec) -> str | None:
    """Why no torch backend can serve this spec; None when they can."""
    for field in ("hidden", "num_topk", "num_ranks", "num_slots_per_rank", "row_alignment"):
        if getattr(spec, field) < 1:
            return f"{field}: {getattr(spec, field)} given, at least 1 needed"
    if spec.payload_dtype not in PAYLOAD_DTYPES:
        return f"payload_dtype: {spec.payload_dtype} given, one of {_names(PAYLOAD_DTYPES)} allowed"
    if spec.out_dtype not in OUT_DTYPES:
        return f"out_dtype: {spec.out_dtype} given, one of {_names(OUT_DTYPES)} allowed"
    return None


def read_choices(
    *,
    x: torch.Tensor,
    topk_slots: torch.Tensor,
    topk_weights: torch.Tensor,
    mode: Mode,
    spec: DispatchSpec,
) -> Choices:
    """List the valid choices; raises ValueError that names the argument that is wrong."""
    check_inputs(x=x, topk_slots=topk_slots, topk_weights=topk_weights, mode=mode, spec=spec)
    flat = topk_slots.cpu().numpy().reshape(-1)
    if flat.size and (flat.min() < -1 or flat.max() >= spec.num_slots):
        raise ValueError(
            f"topk_slots: {flat.min()} to {flat.max()} given, "
            f"slots 0 to {spec.num_slots - 1} and -1 (no expert) allowed"
        )
    valid = np.flatnonzero(flat >= 0)
    weights = topk_weights.cpu().numpy().reshape(-1)[valid]
    return Choices(valid // topk_slots.shape[1], flat[valid], weights)


def check_inputs(
    *,
    x: torch.Tensor,
    topk_slots: torch.Tensor,
    topk_weights: torch.Tensor,
    mode: Mode,
    spec: DispatchSpec,
) -> None:
    """Check all that can be seen without reading values, so that no device is waited for."""
    _check_tensors(x, topk_slots, topk_weights, spec)
    field = "capacity" if mode is Mode.LOW_LATENCY else "max_tokens_per_rank"
    if len(x) > getattr(spec, field):
        raise ValueError(
            f"x: {len(x)} tokens given, at most {field} = {getattr(spec, field)} "
            f"allowed in {mode.value} mode"
        )


def check_group(group: ProcessGroup | None, spec: DispatchSpec) -> ProcessGroup:
    """The group, when it has the ranks of the spec."""
    if group is None:
        raise ValueError(f"group: None given, {spec.num_ranks} ranks need a process group")
    if group.size() != spec.num_ranks:
        raise ValueError(f"group: {group.size()} ranks given, num_ranks = {spec.num_ranks}")
    return group


def plan_send(choices: Choices, *, num_tokens: int, num_ranks: int, num_slots: int) -> SendPlan:
    """Decide the rows for each rank; ``num_slots`` is S. A token goes to a rank at most once."""
    # 1. Sort the choices by (rank, token), keeping k order within.
    ranks = choices.slots // num_slots
    pairs = ranks * num_tokens + choices.tokens
    order = np.argsort(pairs, kind="stable")
    by_pair = pairs[order]
    # 2. Every new pair is a row.
    is_row = np.ones(len(by_pair), dtype=bool)
    np.not_equal(by_pair[1:], by_pair[:-1], out=is_row[1:])
    row_ranks, row_tokens = np.divmod(by_pair[is_row], max(num_tokens, 1))
    row_counts = np.bincount(row_ranks, minlength=num_ranks)
    # 3. An entry's row, counted from the first row for its rank.
    first_rows = row_counts.cumsum() - row_counts
    entry_ranks = ranks[order]
    return SendPlan(
        num_tokens=num_tokens,
        row_tokens=row_tokens,
        row_counts=row_counts,
        entry_counts=np.bincount(ranks, minlength=num_ranks),
        entry_rows=is_row.cumsum() - 1 - first_rows[entry_ranks],
        entry_slots=choices.slots[order] - entry_ranks * num_slots,
        entry_weights=choices.weights[order],
    )


def check_outputs(y: torch.Tensor, dispatched: Dispatched, spec: DispatchSpec) -> None:
    """Check the arguments of combine."""
    if y.shape != dispatched.rows.shape:
        raise ValueError(
            f"y: shape {list(y.shape)} given, {list(dispatched.rows.shape)} (that of rows) needed"
        )
    if y.dtype != spec.out_dtype:
        raise ValueError(f"y: {y.dtype} given, out_dtype = {spec.out_dtype} needed")


def _check_tensors(
    x: torch.Tensor, topk_slots: torch.Tensor, topk_weights: torch.Tensor, spec: DispatchSpec
) -> None:
    if x.dim() != 2 or x.shape[1] != spec.hidden:
        raise ValueError(f"x: shape {list(x.shape)} given, [T, {spec.hidden}] needed")
    if x.dtype not in OUT_DTYPES:
        raise ValueError(f"x: {x.dtype} given, one of {_names(OUT_DTYPES)} allowed")
    for name, tensor, dtype in (
        ("topk_slots", topk_slots, torch.int64),
        ("topk_weights", topk_weights, torch.float32),
    ):
        if tensor.shape != (len(x), spec.num_topk) or tensor.dtype != dtype:
            raise ValueError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} given, "
                f"{dtype} [{len(x)}, {spec.num_topk}] needed"
            )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)

"""Expanded prefill on GPUs: how a step is cut for the kernel, and who takes it.

Keys are cut and rebuilt as ``attention.torch_prefill`` does, so prompts may be cut into chunks at
the same places. But many products' keys together meet all queries in one launch of a kernel per
layer (``attention.triton_prefill``), instead of one tile and one piece at a time.

Shape letters: P prefill tokens, Y keys of a launch, Z tiles of a launch, N heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from attention import new_tokens
from attention.base import AttentionBatch, AttentionSpec
from attention.block_tables import CacheRows
from attention.torch_prefill import (
    KeyGroup,
    Piece,
    PrefillPlan,
    TorchPrefill,
    cut_keys,
    plan_prefills,
)

# Most keys of a launch, at least KEY_ROWS. Few enough to bound what they are rebuilt into: 256 MiB
# for 128 heads of 128 + 128 BF16 values. Enough to be worth a launch: a query that meets several
# reads and writes its float32 sums in each, 1 KiB per head of 128 values, beside 4096 keys of 640
# FLOPs.
GROUP_ROWS = 4096
TILE_COLUMNS = 6


@dataclass(frozen=True)
class Launch:
    """Keys that lie in memory together, and the tiles of queries that meet them.

    cache_rows: int32 ``[Y]``, on the device. products: numbers of keys rebuilt by one product each.
    tiles: int32 ``[Z, 6]``, on the device; see ``_tiles``. is_final: no tile goes on in the next
    launch.
    """

    cache_rows: torch.Tensor
    products: tuple[int, ...]
    tiles: torch.Tensor
    is_final: bool


def plan_launches(batch: AttentionBatch, device: torch.device) -> tuple[Launch, ...]:
    """The requests after the first ``num_decodes``, in token order. One copy to the device."""
    if not batch.has_prefills:
        return ()
    rows_of = CacheRows(batch)
    columns, products, are_final = [], [], []
    for groups in _launches(cut_keys(batch)):
        pieces = [piece for group in groups for piece in group]
        tiles = _tiles(pieces)
        columns += [torch.cat([piece.cache_rows(rows_of) for piece in pieces]), torch.tensor(tiles)]
        products.append(tuple(sum(piece.num_keys for piece in group) for group in groups))
        are_final.append(all(is_last for *_, is_last in tiles))
    packed = torch.cat([column.flatten() for column in columns]).to(torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([column.numel() for column in columns])
    return tuple(
        Launch(rows, keys, tiles.view(-1, TILE_COLUMNS), is_final)
        for rows, tiles, keys, is_final in zip(
            parts[::2], parts[1::2], products, are_final, strict=True
        )
    )


def _launches(groups: Iterator[list[Piece]]) -> Iterator[list[list[Piece]]]:
    launch: list[list[Piece]] = []
    num_keys = 0
    for group in groups:
        more = sum(piece.num_keys for piece in group)
        if launch and num_keys + more > GROUP_ROWS:
            yield launch
            launch, num_keys = [], 0
        launch.append(group)
        num_keys += more
    if launch:
        yield launch


def _tiles(pieces: list[Piece]) -> list[tuple[int, ...]]:
    """Of each tile: its first row among the prefill tokens and its number of rows; the place of the
    request's position 0 among the launch's keys, which may lie before them; the positions of keys
    that it meets, ``start`` to ``stop``; and whether its own keys are the last of these.

    The longest come first: short ones fill the end of a launch.
    """
    tiles: list[tuple[int, ...]] = []
    place = 0
    for prompt, of_request in groupby(pieces, key=lambda piece: piece.prompt):
        some = list(of_request)
        whole = Piece(prompt, some[0].start, some[-1].stop)
        for tile in whole.tiles():
            first, last = tile.queries.start, tile.queries.stop
            stop = whole.start + tile.num_keys
            origin = place - whole.start
            tiles.append((first, last - first, origin, whole.start, stop, int(tile.is_last)))
        place += whole.num_keys
    return sorted(tiles, key=lambda tile: tile[3] - tile[4])


class GpuPrefill(TorchPrefill):
    """What backends for GPUs share: prefill by the kernel where kernels are used, else by torch."""

    def __init__(self, spec: AttentionSpec, *, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, device=device)
        self._uses_kernel = new_tokens.uses_kernel(self.device)

    def plan_prefills(self, batch: AttentionBatch) -> tuple[Launch, ...] | tuple[KeyGroup, ...]:
        if self._uses_kernel:
            return plan_launches(batch, self.device)
        return tuple(plan_prefills(batch, self.device))

    def prefill(
        self, *, q: torch.Tensor, cache: torch.Tensor, w_kv_b: torch.Tensor, plan: PrefillPlan
    ) -> torch.Tensor:
        if not self._uses_kernel:
            return super().prefill(q=q, cache=cache, w_kv_b=w_kv_b, plan=plan)
        from attention.triton_prefill import run_prefill

        return run_prefill(q=q, cache=cache, w_kv_b=w_kv_b, launches=plan.prefills, spec=self.spec)

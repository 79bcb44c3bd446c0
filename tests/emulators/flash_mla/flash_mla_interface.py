"""The two entry points of dense decode, their schedule object, and what they check."""

import dataclasses

import torch

from tests.emulators.cuda_graph import launch
from tests.emulators.device import DEVICE

PAGE = 64
HEAD_DIM, HEAD_DIM_V = 576, 512
MAX_SM_PARTS = 160


class ProcessWouldExit(BaseException):
    """The library calls ``exit(1)`` here; no handler of ``Exception`` may swallow it."""


@dataclasses.dataclass
class FlashMLASchedMeta:
    """``used_for`` is the emulator's: the lengths that the schedule was computed from."""

    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None
    used_for: list[int] | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    _check(not args and not kwargs, "arguments of the old interface, which would be ignored")
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    schedule = tile_scheduler_metadata
    assert isinstance(schedule, FlashMLASchedMeta), "tile_scheduler_metadata is no schedule"
    assert num_splits is None, "num_splits must be None"
    assert indices is None, "sparse attention is not emulated"
    assert attn_sink is extra_k_cache is extra_indices_in_kvcache is None
    assert topk_length is extra_topk_length is None
    assert block_table is not None
    assert cache_seqlens is not None
    _check(not is_fp8_kvcache, "is_fp8_kvcache has no effect on dense attention")
    _check_tensors(q, k_cache, block_table, cache_seqlens, head_dim_v)
    is_first = _bind(schedule, q, k_cache, causal)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.empty(*q.shape[:-1], HEAD_DIM_V, dtype=q.dtype)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])

    def kernels() -> None:
        lengths = _checked_lengths(cache_seqlens, block_table)
        if is_first:
            schedule.used_for = lengths
        elif schedule.used_for != lengths:
            then = schedule.used_for
            raise RuntimeError(
                f"a schedule for lengths {then} was used again for lengths {lengths}"
            )
        for i, length in enumerate(lengths):
            keys = _gather(k_cache, block_table[i], length)
            out[i], lse[i] = _attend(q[i], keys, scale, causal)

    launch(kernels)
    return out, lse


def _attend(
    q: torch.Tensor, keys: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q ``[s, h, 576]``, keys ``[len, 576]`` -> float32 ``[s, h, 512]``, lse ``[h, s]``."""
    num_queries, num_heads, _ = q.shape
    if not len(keys):
        out = torch.zeros(num_queries, num_heads, HEAD_DIM_V)
        return out, torch.full((num_heads, num_queries), torch.inf)
    scores = torch.einsum("shd,td->hst", q.float(), keys.float()) * scale
    if causal and num_queries > 1:
        last_seen = len(keys) - num_queries + torch.arange(num_queries)
        scores.masked_fill_(torch.arange(len(keys)) > last_seen[:, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    probs = (scores - lse[..., None]).exp().to(q.dtype).float()
    return torch.einsum("hst,td->shd", probs, keys[:, :HEAD_DIM_V].float()), lse


def _gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    blocks = table[: -(-length // PAGE)].long()
    if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= len(cache)):
        raise RuntimeError(f"illegal memory access: blocks {blocks.tolist()} of {len(cache)}")
    return cache[blocks].reshape(-1, cache.shape[-1])[:length]


def _check_tensors(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    head_dim_v: int,
) -> None:
    _check(DEVICE.major == 9, f"Dense decode MLA is only supported on SM90a, not {DEVICE.major}.x")
    _check(q.dim() == 4 and cache.dim() == 4, f"q {q.shape}, cache {cache.shape}")
    num_requests, num_queries, num_heads, head_dim = q.shape
    _check(q.dtype in (torch.bfloat16, torch.float16), f"q of {q.dtype}")
    _check(cache.dtype is q.dtype, f"cache of {cache.dtype} for q of {q.dtype}")
    _check(cache.shape[1] == PAGE, f"page_block_size must be {PAGE}, got {cache.shape[1]}")
    _check(cache.shape[3] == head_dim, f"cache of {cache.shape[3]} values, q of {head_dim}")
    _check(head_dim in (512, HEAD_DIM), f"head dim {head_dim} must be {HEAD_DIM} or 512")
    _check(head_dim_v == HEAD_DIM_V, f"head_dim_v must be {HEAD_DIM_V}, got {head_dim_v}")
    _check(num_requests > 0 and num_queries > 0, "no requests or no queries")
    _check(num_heads % cache.shape[2] == 0 and cache.shape[2] == 1, f"{cache.shape[2]} key heads")
    _check(q.is_contiguous() and cache.is_contiguous(), "q and cache must be contiguous")
    _check(lengths.dtype is torch.int32 and lengths.is_contiguous(), f"lengths {lengths.dtype}")
    _check(tuple(lengths.shape) == (num_requests,), f"lengths of shape {tuple(lengths.shape)}")
    _check(table.dtype is torch.int32 and table.dim() == 2, f"block_table of {table.dtype}")
    _check(len(table) == num_requests and table.is_contiguous(), f"block_table {table.shape}")
    if head_dim != HEAD_DIM:
        raise ProcessWouldExit(f"FLASH_ASSERT: head dim {head_dim}")
    parts = max(DEVICE.multi_processor_count // -(-num_queries * num_heads // PAGE), 1)
    if parts > MAX_SM_PARTS:
        raise ProcessWouldExit(f"FLASH_ASSERT: {parts} SM parts")


def _checked_lengths(lengths: torch.Tensor, table: torch.Tensor) -> list[int]:
    found, most = lengths.tolist(), table.shape[1] * PAGE
    _check(min(found) >= 0 and max(found) <= most, f"lengths {found}")
    return found


def _bind(schedule: FlashMLASchedMeta, q: torch.Tensor, cache: torch.Tensor, causal: bool) -> bool:
    """Whether this is the schedule's first call, whose kernels fill it; every later one must ask
    for the same."""
    sizes = (*q.shape[:3], *cache.shape[1:3], causal, False, None, None, None)
    config = FlashMLASchedMeta.Config(*sizes)
    is_first = not schedule.have_initialized
    if is_first:
        schedule.have_initialized = True
        schedule.config = config
        schedule.tile_scheduler_metadata = schedule.num_splits = torch.zeros(1, dtype=torch.int32)
    assert schedule.config == config, f"{config} is inconsistent with sched_meta {schedule.config}"
    return is_first


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(f"flash_mla (emulator): {text}")

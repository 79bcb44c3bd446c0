"""From logits to the next tokens and their log-probabilities.

Shape letters: N sampled rows, P prompt rows, V vocabulary, W candidates per row, k top entries.

Knows nothing of the model or of other ranks. A request's choice depends on its own logits,
parameters, seed and output index alone: each token has its own random number, drawn by a counter-
based generator, so that batch mates, preemption and a replay on another rank change nothing.

Filters apply in vLLM's order, each to what the one before has left:
1. temperature: probabilities are ``softmax(logits / temperature)``;
2. min_p: tokens with at least ``min_p`` times the largest probability stay;
3. top_k: the k most likely stay;
4. top_p: a token stays if the tokens more likely than it have less than ``top_p`` of the mass left.
Among equally likely tokens the lower id counts as more likely (vLLM keeps all that tie in top_k).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_ep.engine.request import Request, SampledToken, SamplingParams, TokenLogprobs

__all__ = ["SampledToken", "Sampler", "prompt_logprobs"]

# Prompt rows whose log-probabilities are computed at a time, to bound the scratch of [rows, V].
_ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class Sampler:
    """Samples one token per request. eos_token_ids: masked, like stop ids, up to min_tokens."""

    eos_token_ids: tuple[int, ...]

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """The next token of each request, with log-probabilities for those that ask.

        logits: float32 ``[N, V]``, row i for request i; not modified. -inf is probability zero,
        +inf takes all of it. Raises ValueError that names the requests whose row has a NaN or no
        possible token.
        """
        if not requests:
            return []
        masked = self._mask_early_stops(logits, requests)
        token_ids = masked.argmax(dim=-1)  # [N], the lowest id among equals
        _check_rows(masked, token_ids, requests)
        for ordered in (False, True):
            rows = [i for i, r in enumerate(requests) if _is_drawn(r.params, ordered=ordered)]
            if rows:
                token_ids[rows] = _draw(masked[rows], [requests[i] for i in rows], ordered=ordered)
        ids = token_ids.tolist()
        logprobs = _sampled_logprobs(logits, ids, requests)
        return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(ids)]

    def _mask_early_stops(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        early = [i for i, r in enumerate(requests) if r.num_output_tokens < r.params.min_tokens]
        if not early:
            return logits
        masked = logits.clone()
        for i in early:
            ends = {*self.eos_token_ids, *requests[i].params.stop_token_ids}
            in_vocabulary = [token_id for token_id in ends if 0 <= token_id < logits.shape[1]]
            masked[i, torch.tensor(in_vocabulary, dtype=torch.int64)] = -torch.inf
        return masked


def prompt_logprobs(
    logits: torch.Tensor, *, token_ids: Sequence[int], num_top: int, request_id: str
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of prompt tokens.

    logits: float32 ``[P, V]``. token_ids: for each row the prompt token that follows it. num_top:
    most likely entries per row. Raises ValueError that names the request when a row has a NaN.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_A_TIME):
        rows = logits[start : start + _ROWS_AT_A_TIME]
        entries += _token_logprobs(rows, token_ids[start : start + len(rows)], num_top)
    if any(entry.logprob != entry.logprob for entry in entries):
        raise ValueError(f"request {request_id!r}: its prompt logits are NaN")
    return tuple(entries)


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of output token ``index``: the top 53 bits of Philox4x64-10."""
    bits = np.random.Philox(key=seed % 2**64, counter=index).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def _check_rows(logits: torch.Tensor, best_ids: torch.Tensor, requests: Sequence[Request]) -> None:
    # argmax takes a NaN for the largest value, so the best value tells about the whole row.
    best = logits.gather(1, best_ids[:, None]).squeeze(1)
    bad = (best.isnan() | (best == -torch.inf)).tolist()
    if any(bad):
        names = [
            request.request_id for request, is_bad in zip(requests, bad, strict=True) if is_bad
        ]
        raise ValueError(f"requests {names}: their logits hold a NaN, or no token is possible")


def _is_drawn(params: SamplingParams, *, ordered: bool) -> bool:
    """Whether the request is sampled at random, and from ordered candidates or not."""
    needs_order = params.top_k is not None or params.top_p < 1.0
    return params.temperature > 0 and needs_order is ordered


def _draw(logits: torch.Tensor, requests: Sequence[Request], *, ordered: bool) -> torch.Tensor:
    """Draw one token id per row, int64 ``[N]``; ordered when a row's filters need the order."""
    params = [request.params for request in requests]
    uniforms = [uniform(r.params.seed or 0, r.num_output_tokens) for r in requests]
    if not ordered:
        return _invert_cdf(_weights(logits, params), uniforms)
    vocab = logits.shape[1]
    width = max(min(p.top_k or vocab, vocab) for p in params)
    candidates = _most_likely(logits, width)  # [N, W]
    weights = _weights(logits.gather(1, candidates), params)
    choice = _invert_cdf(_filter_ordered(weights, params), uniforms)
    return candidates.gather(1, choice[:, None]).squeeze(1)


def _weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities relative to the largest, float64; zero where min_p drops the token.

    logits ``[N, W]`` hold each row's largest.
    """
    shifted = _below_top(logits.double())
    weights = (shifted / _column([p.temperature for p in params], shifted)).exp()
    return weights.where(weights >= _column([p.min_p for p in params], weights), 0.0)


def _filter_ordered(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply top_k, then top_p to weights ``[N, W]`` in falling order; the first always stays."""
    width = weights.shape[1]
    top_k = _column([p.top_k or width for p in params], weights)
    weights = weights.where(torch.arange(width, device=weights.device) < top_k, 0.0)
    mass = weights.cumsum(dim=1)
    is_kept = torch.ones_like(weights, dtype=torch.bool)
    is_kept[:, 1:] = mass[:, :-1] < _column([p.top_p for p in params], weights) * mass[:, -1:]
    return weights.where(is_kept, 0.0)


def _invert_cdf(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """The column at which the running sum passes ``uniform * total``, int64 ``[N]``."""
    mass = weights.cumsum(dim=1)
    # A uniform is at most 1 - 2**-53, so the product rounds below the total, and the column found
    # has a positive weight.
    target = _column(uniforms, mass) * mass[:, -1:]
    return torch.searchsorted(mass, target, right=True).squeeze(1)


def _most_likely(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest of each row in falling order, int64 ``[N, k]``; lower id first among
    equals, which ``torch.topk`` on floats does not promise."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the floats' order
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.topk((order << 32) - ids, k, dim=1).indices


def _below_top(logits: torch.Tensor) -> torch.Tensor:
    """Logits less the row's largest; 0 for the largest itself, also when it is infinite."""
    top = logits.amax(dim=1, keepdim=True)
    return (logits - top).masked_fill(logits == top, 0.0)


def _sampled_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], requests: Sequence[Request]
) -> dict[int, TokenLogprobs]:
    """By row, for the requests that ask; of the raw logits, before temperature and filters."""
    wanted = {i: n for i, r in enumerate(requests) if (n := r.params.logprobs) is not None}
    if not wanted:
        return {}
    rows = list(wanted)
    entries = _token_logprobs(logits[rows], [token_ids[i] for i in rows], max(wanted.values()))
    return {
        i: replace(entry, top_ids=entry.top_ids[:n], top_logprobs=entry.top_logprobs[:n])
        for (i, n), entry in zip(wanted.items(), entries, strict=True)
    }


def _token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """One entry per row. The rank of a token is one more than the number of likelier ones."""
    below = _below_top(logits)
    # A running sum, since the order in which torch.sum adds depends on the number of rows.
    log_total = below.exp().cumsum(dim=1, dtype=torch.float64)[:, -1:].log()
    own = torch.tensor(token_ids, device=logits.device)[:, None]  # [N, 1]
    top = _most_likely(logits, min(num_top, logits.shape[1]))  # [N, k]
    ranks = (logits > logits.gather(1, own)).sum(dim=1) + 1
    columns = (
        token_ids,
        (below.gather(1, own) - log_total).squeeze(1).tolist(),
        ranks.tolist(),
        map(tuple, top.tolist()),
        map(tuple, (below.gather(1, top) - log_total).tolist()),
    )
    return [TokenLogprobs(*row) for row in zip(*columns, strict=True)]


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """One value per row, ``[N, 1]``, in the dtype and on the device of ``like``."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

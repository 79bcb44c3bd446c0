"""From logits to the next tokens and their log-probabilities.

Shape letters: N rows, V vocabulary, W candidates per row, k top entries.

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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_ep.engine.request import Request, SampledToken, SamplingParams, TokenLogprobs

__all__ = ["SampledToken", "Sampler", "token_logprobs"]

# Candidates that are ordered first when top_p alone says how many are needed.
_NUM_FIRST = 1024
# Sums of float64 weights in two orders differ by less than this share: each errs by V * 2**-53.
_SUM_ERROR = 1e-9


@dataclass(frozen=True)
class Sampler:
    """Samples one token per request. eos_token_ids: masked, like stop ids, up to min_tokens."""

    eos_token_ids: tuple[int, ...]

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """The next token of each request, with log-probabilities for those that ask.

        logits: float32 ``[N, V]``, row i for request i; not modified. -inf is probability zero,
        +inf takes all of it. A row with a NaN or without a possible token gives an error and no
        token; the other rows do not notice.
        """
        if not requests:
            return []
        masked = self._mask_early_stops(logits, requests)
        token_ids = masked.argmax(dim=-1)  # [N], the lowest id among equals
        # argmax takes a NaN for the largest value, so the best value tells about the whole row.
        errors = [_row_error(best) for best in masked.gather(1, token_ids[:, None])[:, 0].tolist()]
        good = [i for i, error in enumerate(errors) if error is None]
        for draw in (_draw_any, _draw_top_k, _draw_nucleus):
            rows = [i for i in good if _draw_for(requests[i].params) is draw]
            if rows:
                params = [requests[i].params for i in rows]
                indices = [requests[i].num_output_tokens for i in rows]
                uniforms = [uniform(p.seed or 0, at) for p, at in zip(params, indices, strict=True)]
                token_ids[rows] = draw(masked[rows], params, uniforms)
        ids = token_ids.tolist()
        logprobs = _sampled_logprobs(logits, ids, requests)
        return [
            SampledToken(token_id, logprobs.get(i))
            if error is None
            else SampledToken(None, error=error)
            for i, (token_id, error) in enumerate(zip(ids, errors, strict=True))
        ]

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


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of one token per row, NaN for a row that holds a NaN.

    logits: float32 ``[N, V]``. num_top: most likely entries per row. The rank of a token is one
    more than the number of likelier ones.
    """
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


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of output token ``index``: the top 53 bits of Philox4x64-10."""
    bits = np.random.Philox(key=seed % 2**64, counter=index).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def _row_error(best: float) -> str | None:
    """What is wrong with a row whose largest logit is this."""
    if math.isnan(best):
        return "its logits hold a NaN"
    if best == -math.inf:
        return "no token is possible: of each the logit is -inf, or it is an end before min_tokens"
    return None


# Draws one token id per row, int64 [N], from logits [N, V], parameters and uniforms of each row.
_Draw = Callable[[torch.Tensor, Sequence[SamplingParams], Sequence[float]], torch.Tensor]


def _draw_for(params: SamplingParams) -> _Draw | None:
    """By what has to be in order: nothing, the top_k, or as many as top_p takes; None if greedy."""
    if params.temperature == 0:
        return None
    if params.top_k is not None:
        return _draw_top_k
    return _draw_nucleus if params.top_p < 1.0 else _draw_any


def _draw_any(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    return _invert_cdf(_weights(logits, params), uniforms)


def _draw_top_k(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    vocab = logits.shape[1]
    candidates = _most_likely(logits, max(min(p.top_k or vocab, vocab) for p in params))  # [N, W]
    weights = _keep_top_k(_weights(logits.gather(1, candidates), params), params)
    limits = _limits(weights.cumsum(dim=1)[:, -1:], params)
    return _pick(candidates, _keep_nucleus(weights, limits), uniforms)


def _draw_nucleus(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """The same tokens as ``_draw_top_k`` of all V, which orders them only in rows that need it."""
    candidates = _most_likely(logits, min(_NUM_FIRST, logits.shape[1]))
    weights = _weights(logits.gather(1, candidates), params)
    limits = _limits(_weights(logits, params).sum(dim=1, keepdim=True), params)
    token_ids = _pick(candidates, _keep_nucleus(weights, limits), uniforms)
    # A row needs it when the first candidates are too few, or when a sum in falling order could
    # round to the other side of the limit.
    mass = weights.cumsum(dim=1)
    is_close = (mass - limits).abs() <= _SUM_ERROR * limits
    is_unsure = (mass[:, -1:] < limits) | is_close.any(dim=1, keepdim=True)
    rest = is_unsure.squeeze(1).nonzero().squeeze(1).tolist()
    if rest:
        token_ids[rest] = _draw_top_k(
            logits[rest], [params[i] for i in rest], [uniforms[i] for i in rest]
        )
    return token_ids


def _weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities relative to the largest, float64; zero where min_p drops the token.

    logits ``[N, W]`` hold each row's largest.
    """
    weights = _below_top(logits.double())
    weights = weights.div_(_column([p.temperature for p in params], weights)).exp_()
    return weights.masked_fill_(weights < _column([p.min_p for p in params], weights), 0.0)


def _keep_top_k(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Weights ``[N, W]`` in falling order, zero past the first top_k."""
    width = weights.shape[1]
    top_k = _column([p.top_k or width for p in params], weights)
    return weights.where(torch.arange(width, device=weights.device) < top_k, 0.0)


def _limits(total: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The mass at which the nucleus of a ``total`` is complete, ``[N, 1]``."""
    return _column([p.top_p for p in params], total) * total


def _keep_nucleus(weights: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Weights ``[N, W]`` in falling order, zero past the limit; the first always stays."""
    is_kept = torch.ones_like(weights, dtype=torch.bool)
    is_kept[:, 1:] = weights.cumsum(dim=1)[:, :-1] < limits
    return weights.where(is_kept, 0.0)


def _pick(
    candidates: torch.Tensor, weights: torch.Tensor, uniforms: Sequence[float]
) -> torch.Tensor:
    return candidates.gather(1, _invert_cdf(weights, uniforms)[:, None]).squeeze(1)


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
    return torch.topk(order.bitwise_left_shift_(32).sub_(ids), k, dim=1).indices


def _below_top(logits: torch.Tensor) -> torch.Tensor:
    """Logits less the row's largest; 0 for the largest itself, also when it is infinite."""
    top = logits.amax(dim=1, keepdim=True)
    return (logits - top).masked_fill_(logits == top, 0.0)


def _sampled_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], requests: Sequence[Request]
) -> dict[int, TokenLogprobs]:
    """By row, for the requests that ask; of the raw logits, before temperature and filters."""
    wanted = {i: n for i, r in enumerate(requests) if (n := r.params.logprobs) is not None}
    if not wanted:
        return {}
    rows = list(wanted)
    entries = token_logprobs(logits[rows], [token_ids[i] for i in rows], max(wanted.values()))
    return {
        i: replace(entry, top_ids=entry.top_ids[:n], top_logprobs=entry.top_logprobs[:n])
        for (i, n), entry in zip(wanted.items(), entries, strict=True)
    }


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """One value per row, ``[N, 1]``, in the dtype and on the device of ``like``."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

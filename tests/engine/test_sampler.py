"""Sampling against float64 references worked one row at a time, and what must not change it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.engine import sampler as sampler_module
from moe_ep.engine.request import Request, SamplingParams
from moe_ep.engine.sampler import Sampler, token_logprobs, uniform

INF, NAN = math.inf, math.nan
EOS = 2
SAMPLER = Sampler(eos_token_ids=(EOS,))


def make_request(name="r", num_output=0, **params):
    params = {"temperature": 1.0, "seed": 0} | params
    return Request(
        request_id=name,
        params=SamplingParams(**params),
        prompt_len=1,
        arrival=0,
        max_len=1000,
        token_ids=[0] * (1 + num_output),
    )


def random_logits(num_rows, vocab, seed=0):
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def pick(row, **params):
    return SAMPLER.sample(torch.tensor([row]), [make_request(**params)])[0].token_id


def reference_probabilities(logits, params):
    """Filtered probabilities of one row, by id, worked as the definition reads."""
    scaled = [x / params.temperature for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda i: (-logits[i], i))
    kept = [i for i in order if probs[i] >= params.min_p * max(probs)]
    kept = kept[: params.top_k]
    total, nucleus = sum(probs[i] for i in kept), []
    for i in kept:
        if nucleus and sum(probs[j] for j in nucleus) >= params.top_p * total:
            break
        nucleus.append(i)
    mass = sum(probs[i] for i in nucleus)
    return {i: probs[i] / mass for i in nucleus}


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "min_p": 0.07},
    {"top_k": 5},
    {"top_p": 0.83},
    {"top_k": 1000},
    {"top_k": 6, "top_p": 0.61, "min_p": 0.04, "temperature": 1.7},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_frequencies_match_the_exact_distribution(params):
    num_draws, logits = 4000, random_logits(1, 24, seed=3)
    requests = [make_request(num_output=i, seed=11, **params) for i in range(num_draws)]
    tokens = SAMPLER.sample(logits.expand(num_draws, -1).contiguous(), requests)
    counts = np.bincount([token.token_id for token in tokens], minlength=24)
    exact = reference_probabilities(logits[0].tolist(), requests[0].params)
    assert set(np.flatnonzero(counts)) <= set(exact)
    expected = np.array([exact.get(i, 0.0) for i in range(24)]) * num_draws
    common = expected >= 5
    chi2 = (((counts - expected)[common]) ** 2 / expected[common]).sum()
    # Mean d, deviation sqrt(2d): six deviations never happen by chance at a fixed seed.
    degrees = common.sum()
    assert chi2 < degrees + 6 * math.sqrt(2 * degrees)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.05, 5),
    min_p=st.just(0.0) | st.floats(0, 1),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.just(1.0) | st.floats(0.01, 1),
)
def test_every_uniform_hits_the_token_that_the_reference_names(
    seed, temperature, min_p, top_k, top_p
):
    logits = random_logits(1, 32, seed)
    request = make_request(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    exact = reference_probabilities(logits[0].tolist(), request.params)
    is_ordered = top_k is not None or top_p < 1
    order = list(exact) if is_ordered else sorted(exact)
    ends = np.cumsum([exact[i] for i in order])
    for token_id, end, share in zip(order, ends, [exact[i] for i in order], strict=True):
        if share > 1e-9:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sampler_module, "uniform", lambda *_, x=end - share / 2: float(x))
                assert SAMPLER.sample(logits, [request])[0].token_id == token_id


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_the_ends_of_the_unit_interval_give_possible_tokens(u, params, monkeypatch):
    monkeypatch.setattr(sampler_module, "uniform", lambda *_: u)
    logits = random_logits(1, 24, seed=5)
    logits[0, [0, 23]] = -INF
    request = make_request(**params)
    token = SAMPLER.sample(logits, [request])[0].token_id
    assert token in reference_probabilities(logits[0].tolist(), request.params)


def mixed_requests(num_rows):
    return [
        make_request(f"r{i}", i % 4, seed=i, logprobs=(None, 0, 3)[i % 3], **FILTERS[i % 7])
        for i in range(num_rows)
    ]


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


# With more than 32768 entries torch splits the sum of one row, but not of several, over threads.
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [97, 40000])
def test_batch_mates_change_nothing(vocab):
    logits, requests = random_logits(14, vocab), mixed_requests(14)
    together = SAMPLER.sample(logits, requests)
    assert [
        SAMPLER.sample(logits[i : i + 1], requests[i : i + 1])[0] for i in range(14)
    ] == together
    order = list(np.random.default_rng(0).permutation(14))
    shuffled = SAMPLER.sample(logits[order], [requests[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_the_same_seed_and_index_draw_the_same_token_and_others_do_not():
    numbers = [uniform(seed, index) for seed in range(30) for index in range(30)]
    assert numbers == [uniform(seed, index) for seed in range(30) for index in range(30)]
    assert len(set(numbers)) == 900
    assert all(0 <= number < 1 for number in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.05
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_greedy_takes_the_lowest_id_among_equals_and_leaves_the_logits_alone():
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0], [7.0, 7.0, 7.0, 7.0], [-INF, -INF, -5.0, -INF]])
    before = logits.clone()
    tokens = SAMPLER.sample(logits, [make_request(temperature=0.0, min_tokens=0)] * 3)
    assert [token.token_id for token in tokens] == [1, 0, 2]
    SAMPLER.sample(logits[:2], [make_request(min_tokens=5), make_request()])
    assert torch.equal(logits, before)


def test_ties_in_filters_go_to_the_lower_id():
    for seed in range(20):
        assert pick([1.0, 5.0, 5.0, 5.0], top_k=1, seed=seed) == 1
        assert pick([1.0, 5.0, 5.0, 5.0], top_k=2, seed=seed) in (1, 2)
        assert pick([5.0, 5.0, 5.0, 5.0], top_p=0.25, seed=seed) == 0
        assert pick([-0.0, 0.0, -0.0, -9.0], top_k=1, seed=seed) == 0
        assert pick([1.0, 5.0, 4.9, 5.0], min_p=1.0, seed=seed) in (1, 3)


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_extreme_logits(params):
    for seed in range(10):
        params |= {"seed": seed}
        assert pick([0.0, 1.0, INF, 3.0], **params) == 2
        assert pick([-INF, -INF, -INF, -1e38], **params) == 3
        assert pick([-3e38, 3e38, 0.0, 0.0], **params) == 1
        assert pick([INF, 0.0, 0.0, INF], **params) in (0, 3)
        assert pick([0.0, 1e-30, 0.0, 0.0], **params | {"temperature": 1e-300}) == 1


KINDS = [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}]


@pytest.mark.parametrize("params", KINDS, ids=str)
@pytest.mark.parametrize(
    ("row", "error"),
    [
        ([0.0, NAN, 9.0], "its logits hold a NaN"),
        ([NAN, 1.0, INF], "its logits hold a NaN"),
        ([NAN, NAN, NAN], "its logits hold a NaN"),
        ([-INF, -INF, -INF], "no token is possible"),
    ],
)
def test_an_impossible_row_gives_an_error_and_its_mates_what_they_get_alone(params, row, error):
    logits = torch.tensor([[0.0, 1.0, 2.0], row, [3.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    others = [make_request(f"r{i}", i, logprobs=1, **params) for i in range(3)]
    bad = make_request("bad", logprobs=2, prompt_logprobs=0, **params)
    first, failed, *rest = SAMPLER.sample(logits, [others[0], bad, *others[1:]])
    assert (failed.token_id, failed.logprobs) == (None, None)
    assert error in failed.error
    alone = [SAMPLER.sample(logits[[i]], [r])[0] for i, r in zip((0, 2, 3), others, strict=True)]
    assert [first, *rest] == alone


def test_a_request_whose_every_token_is_an_early_end_gets_an_error():
    request = make_request(min_tokens=1, stop_token_ids=tuple(range(4)), logprobs=0)
    found = SAMPLER.sample(torch.zeros(2, 4), [request, make_request(temperature=0.0)])
    assert "before min_tokens" in found[0].error
    assert (found[0].token_id, found[1].token_id, found[1].error) == (None, 0, None)


# Of 4000 tokens the first 1024 do for peaked rows; flat ones need more of them.
ROW_SPREADS = (0.0, 0.05, 0.5, 1.0, 2.0, 4.0, 30.0)


def nucleus_rows(seed):
    spreads = torch.tensor([ROW_SPREADS[i % 7] for i in range(28)])
    logits = random_logits(28, 4000, seed) / 3 * spreads[:, None]
    logits[20, ::3] = -INF
    logits[21, 5] = INF
    logits[22] = logits[22].round()  # ties
    rng = np.random.default_rng(seed)
    params = [
        {
            "top_p": float(rng.choice([1e-3, 0.1, 0.256, 0.5, 0.9, 0.99, 1 - 1e-12])),
            "top_k": (None, None, None, 40, 2000)[rng.integers(5)],
            "min_p": (0.0, 0.0, 1e-3, 0.5)[rng.integers(4)],
            "temperature": (1.0, 1.0, 0.3, 3.0)[rng.integers(4)],
        }
        for _ in range(28)
    ]
    return logits, [make_request(f"r{i}", i % 5, seed=i, **p) for i, p in enumerate(params)]


@pytest.mark.parametrize("seed", range(12))
def test_the_first_candidates_give_the_tokens_that_the_whole_vocabulary_gives(seed, monkeypatch):
    logits, requests = nucleus_rows(seed)
    found = SAMPLER.sample(logits, requests)
    monkeypatch.setattr(sampler_module, "_draw_nucleus", sampler_module._draw_top_k)
    assert SAMPLER.sample(logits, requests) == found


def test_only_rows_with_a_wide_nucleus_order_the_whole_vocabulary(monkeypatch):
    logits = torch.cat([random_logits(5, 4000), random_logits(1, 4000) / 30])
    widths, most_likely = [], sampler_module._most_likely
    monkeypatch.setattr(
        sampler_module,
        "_most_likely",
        lambda rows, k: widths.append((len(rows), k)) or most_likely(rows, k),
    )
    SAMPLER.sample(logits, [make_request(top_p=0.9, seed=i) for i in range(6)])
    assert widths == [(6, 1024), (1, 4000)]
    widths.clear()
    params = [{"top_p": 0.9}, {"top_k": 5}, {}, {"top_k": 7, "top_p": 0.5}, {"temperature": 0.0}]
    SAMPLER.sample(logits[:5], [make_request(**each) for each in params])
    assert widths == [(2, 7), (1, 1024)]


def test_a_limit_that_rounding_could_move_is_settled_by_the_whole_vocabulary(monkeypatch):
    """A quarter of 4096 equal tokens is exactly 1024 of them."""
    monkeypatch.setattr(sampler_module, "uniform", lambda *_: 1 - 2**-53)
    row, calls, draw = torch.zeros(1, 4096), [], sampler_module._draw_top_k
    monkeypatch.setattr(sampler_module, "_draw_top_k", lambda *a: calls.append(1) or draw(*a))
    assert SAMPLER.sample(row, [make_request(top_p=0.25)])[0].token_id == 1023
    assert calls == [1]


def test_min_tokens_masks_eos_and_stop_ids_until_reached():
    row = [0.0, 1.0, 9.0, 8.0]
    ends = {"temperature": 0.0, "stop_token_ids": (3, 10**6), "min_tokens": 2}
    assert [pick(row, num_output=i, **ends) for i in range(4)] == [1, 1, 2, 2]
    unending = Sampler(eos_token_ids=())
    request = make_request(temperature=0.0, min_tokens=2)
    assert unending.sample(torch.tensor([row]), [request])[0].token_id == 2


def reference_logprobs(row):
    row = row.double()
    return row - torch.logsumexp(row, 0)


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(3, 50, seed=9)
    requests = [
        make_request("a", temperature=0.2, top_k=1, logprobs=4),
        make_request("b", logprobs=0, seed=4),
        make_request("c"),
    ]
    tokens = SAMPLER.sample(logits, requests)
    for i in range(2):
        exact, found = reference_logprobs(logits[i]), tokens[i].logprobs
        assert found.token_id == tokens[i].token_id
        assert found.logprob == pytest.approx(exact[found.token_id].item(), abs=1e-6)
        assert found.rank == 1 + int((exact > exact[found.token_id]).sum())
    values, ids = reference_logprobs(logits[0]).topk(4)
    assert tokens[0].logprobs.top_ids == tuple(ids.tolist())
    assert tokens[0].logprobs.top_logprobs == pytest.approx(values.tolist(), abs=1e-6)
    assert tokens[1].logprobs.top_ids == ()
    assert tokens[2].logprobs is None


def test_logprobs_with_ties_infinities_and_more_entries_than_tokens():
    logits = torch.tensor([[5.0, 5.0, -INF, 5.0], [INF, 1.0, 1.0, -INF]])
    requests = [make_request(temperature=0.0, logprobs=9) for _ in range(2)]
    tied, infinite = (token.logprobs for token in SAMPLER.sample(logits, requests))
    assert (tied.token_id, tied.rank, tied.top_ids) == (0, 1, (0, 1, 3, 2))
    assert tied.top_logprobs == pytest.approx([-math.log(3)] * 3 + [-INF])
    assert (infinite.token_id, infinite.logprob) == (0, 0.0)
    assert infinite.top_logprobs == (0.0, -INF, -INF, -INF)


def test_token_logprobs_row_by_row():
    logits = random_logits(7, 40, seed=2)
    logits[5, 0] = NAN
    ids = [i * 7 % 40 for i in range(7)]
    entries = token_logprobs(logits, ids, num_top=2)
    assert [entry.token_id for entry in entries] == ids
    assert math.isnan(entries.pop(5).logprob)
    for i, entry in zip((0, 1, 2, 3, 4, 6), entries, strict=True):
        exact = reference_logprobs(logits[i])
        assert entry.logprob == pytest.approx(exact[entry.token_id].item(), abs=1e-5)
        assert entry.rank == 1 + int((exact > exact[entry.token_id]).sum())
        assert entry.top_ids == tuple(exact.topk(2).indices.tolist())


def test_no_rows():
    assert SAMPLER.sample(torch.empty(0, 7), []) == []

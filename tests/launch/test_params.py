"""Every field of the sampling parameters: what is refused, by name, and what passes unchanged."""

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest

from launch.params import check_params, check_token_ids
from moe_ep.engine.request import SamplingParams
from tests.launch.python_calls import PythonCalls

WRONG: list[tuple[str, list[Any]]] = [
    ("n", [0, -1, 129, 1.0, True, "1", None]),
    ("temperature", [-0.1, math.nan, math.inf, "1", None, True]),
    ("top_p", [0.0, -0.5, 1.01, math.nan, None]),
    ("top_k", [0, -1, 1.5, True]),
    ("min_p", [-0.1, 1.1, math.nan, None]),
    ("seed", [2**63, -(2**63) - 1, 1.0, "7"]),
    ("stop", ["", ("",), (1,), [None], 3]),
    ("stop_token_ids", [(-1,), (100,), ("1",), 5, (1.0,)]),
    ("min_tokens", [-1, 17, None, 1.0]),
    ("max_tokens", [0, -1, 1.5, "16"]),
    ("ignore_eos", [None, 1, "yes"]),
    ("logprobs", [-1, 21, 1.0, True]),
    ("prompt_logprobs", [-1, 21]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(f, value) for f, values in WRONG for value in values]
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any):
    with pytest.raises(ValueError, match=f"^{field}: "):
        check_params(replace(SamplingParams(), **{field: value}), vocab_size=100)


def test_defaults_and_limits_pass_unchanged():
    limits = SamplingParams(
        n=128,
        temperature=0.0,
        top_p=1e-9,
        top_k=1,
        min_p=1.0,
        seed=-(2**63),
        stop=("x",),
        stop_token_ids=(0, 99),
        min_tokens=3,
        max_tokens=3,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=20,
    )
    for params in (SamplingParams(), limits, replace(limits, max_tokens=None, min_tokens=10**6)):
        assert check_params(params, vocab_size=100) == params


def test_lists_and_single_strings_become_tuples():
    loose = SamplingParams(stop="end", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert check_params(loose, 100) == SamplingParams(stop=("end",), stop_token_ids=(1, 2))
    none = SamplingParams(stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert check_params(none, 100) == SamplingParams()


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((), "prompt: empty"),
        ((1, 100), r"prompt\[1\]: 100"),
        ((-1,), r"prompt\[0\]: -1"),
        ((1, True), r"prompt\[1\]: True"),
        ((1.5,), r"prompt\[0\]: 1.5"),
    ],
)
def test_wrong_token_ids_are_refused_by_position(token_ids: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        check_token_ids(token_ids, vocab_size=100)
    check_token_ids((0, 99), vocab_size=100)


def test_wrong_token_ids_that_are_alone_in_a_long_prompt():
    for wrong in (-1, 100, True, 1.0, None, "5"):
        with pytest.raises(ValueError, match=rf"^prompt\[777\]: {wrong!r} given; .*0 to 99"):
            check_token_ids([5] * 777 + [wrong] + [5] * 222, vocab_size=100)  # type: ignore[list-item]


def test_token_ids_of_a_subclass_of_int_are_as_good():
    class Id(int):
        pass

    check_token_ids((0, Id(99)), vocab_size=100)
    with pytest.raises(ValueError, match=r"^prompt\[1\]: 100"):
        check_token_ids((0, Id(100)), vocab_size=100)


@pytest.mark.parametrize("last", [5, 100])
def test_no_python_function_runs_per_token(last: int):
    """The check runs on the event loop, which all requests share."""
    with PythonCalls() as calls, contextlib.suppress(ValueError):
        check_token_ids((5,) * 999 + (last,), vocab_size=100)
    assert calls.of(check_token_ids) == 1
    assert calls.total < 10

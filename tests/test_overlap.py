"""Taking turns: order, results, and exceptions."""

from collections.abc import Generator

import pytest

from moe_ep import overlap


def _steps(name: str, num_yields: int, log: list[str]) -> Generator[None, None, str]:
    try:
        for i in range(num_yields):
            log.append(f"{name}{i}")
            yield
        log.append(f"{name} end")
    finally:
        log.append(f"{name} closed")
    return name.upper()


def test_one_generator_is_drained():
    log: list[str] = []
    assert overlap.run([_steps("a", 2, log)]) == ["A"]
    assert log == ["a0", "a1", "a end", "a closed"]


def test_two_take_turns_and_the_longer_one_finishes_alone():
    log: list[str] = []
    assert overlap.run([_steps("a", 1, log), _steps("b", 3, log)]) == ["A", "B"]
    assert [entry for entry in log if "closed" not in entry] == [
        "a0", "b0", "a end", "b1", "b2", "b end",
    ]  # fmt: skip


def test_an_exception_closes_the_other_generator():
    log: list[str] = []

    def fails() -> Generator[None, None, str]:
        yield
        raise RuntimeError("the reason")

    other = _steps("a", 3, log)  # held here, so that only an explicit close ends it
    with pytest.raises(RuntimeError, match="the reason"):
        overlap.run([other, fails()])
    assert log == ["a0", "a1", "a closed"]


def test_nothing_to_run():
    assert overlap.run([]) == []

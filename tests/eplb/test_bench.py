"""The benchmark of placing runs, and says what it measured."""

import json

import pytest

from bench import eplb as bench


def test_a_short_run(capsys: pytest.CaptureFixture[str]):
    bench.main(["--layers", "2", "--rounds", "2"])
    *tables, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert len(result["rows"]) == 4 * 3 + 1
    by_case: dict[tuple[int, ...], dict[str, dict]] = {}
    for row in result["rows"]:
        by_case.setdefault(tuple(row["case"]), {})[row["policy"]] = row
    for policies in by_case.values():
        assert policies["ours"]["mean"] >= policies["published"]["mean"]
        assert policies["ours"]["mean"] <= policies["ours"]["allowed"]
    unchanged, *_, unlimited, anew = result["changes"][:6]
    assert unchanged["moved"] == 0
    assert unchanged["mean"] < unlimited["mean"]
    assert unlimited["moved"] < anew["moved"]
    assert any("uneven split" in line for line in tables)

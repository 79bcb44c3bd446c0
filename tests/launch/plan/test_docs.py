"""docs/plan.md shows what the command says today."""

import re
from pathlib import Path

import pytest

from launch.cli import main
from launch.plan.parameters import ranges
from launch.plan.validate import KINDS, leave_one_source_out

TEXT = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")
COMMANDS, PAGE, ADVICE = (block for block in TEXT.split("```")[1:6:2])


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.fixture
def said(monkeypatch, tmp_path: Path, capsys):
    """What a command of the docs prints, in 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(command: str) -> list[str]:
        assert main(command.split()[1:]) == 0, command
        return lines_of(capsys.readouterr().out)

    return run


def test_every_command_runs(said):
    commands = lines_of(COMMANDS)
    assert len(commands) > 5
    for command in commands:
        assert said(command)


def test_the_pages_are_those_of_today(said):
    first, *_ = lines_of(COMMANDS)
    advice = next(line for line in lines_of(COMMANDS) if "--gpus" in line)
    assert said(first) == lines_of(PAGE.removeprefix("text"))
    assert said(advice) == lines_of(ADVICE.removeprefix("text"))


def test_the_errors_are_those_of_today():
    rows = re.findall(
        r"^\| .* \| (\d+) \| (\d+) \| ([\d.]+)% \| -(\d+)% to \+(\d+)% of", TEXT, re.M
    )
    assert len(rows) == len(KINDS)
    for kind, (sources, records, error, low, high) in zip(KINDS, rows, strict=True):
        groups = [o.target.group for o in leave_one_source_out() if o.target.kind == kind]
        found = ranges()[kind]
        assert (int(sources), int(records)) == (len(set(groups)), len(groups))
        assert float(error) == pytest.approx(100 * found.median_error, abs=0.06)
        assert int(low) == pytest.approx(100 * (1 - found.low), abs=0.51)
        assert int(high) == pytest.approx(100 * (found.high - 1), abs=0.51)

"""Flags made from the config dataclasses, and the document made from the same."""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from launch.flags import SECTIONS, add_flags, document, from_args, option_name
from launch.launch_config import ServerConfig
from moe_ep.config import EngineConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "flags.md"


def _parse(config: type, *argv: str):
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    return from_args(config, parser.parse_args(argv))


def test_the_document_is_what_the_code_generates():
    assert DOCUMENT.read_text(encoding="utf-8") == document(), (
        "run: python -m launch.flags > docs/flags.md"
    )


def test_no_flag_given_is_the_default_config():
    assert _parse(EngineConfig, "--model", "m") == EngineConfig(model="m")
    assert _parse(ServerConfig) == ServerConfig()


def test_every_kind_of_value():
    config = _parse(
        EngineConfig, "--model", "m", "--ep-size", "4", "--gpu-memory-utilization", "0.5",
        "--enforce-eager", "--cuda-graph-bs", "1", "8", "--max-model-len", "99",
    )  # fmt: skip
    assert config == EngineConfig(
        model="m", ep_size=4, gpu_memory_utilization=0.5, enforce_eager=True,
        cuda_graph_bs=(1, 8), max_model_len=99,
    )  # fmt: skip


def test_the_model_is_required(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        _parse(EngineConfig)
    assert caught.value.code == 2
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize("config", SECTIONS)
def test_help_and_document_say_of_every_count_whether_per_rank_or_total(
    config: type, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "500")
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    # One line per flag, also where the flag is so long that its help has a line of its own.
    lines = re.sub(r"(\n  --.*)\n {8,}", r"\1 ", parser.format_help()).splitlines()
    rows = document().splitlines()
    for field in dataclasses.fields(config):
        name, scope = option_name(field.name), field.metadata["scope"]
        (line,) = (line for line in lines if line.lstrip().startswith((f"{name} ", f"{name},")))
        (row,) = (row for row in rows if row.startswith(f"| `{name}` |"))
        assert field.metadata["help"] in line
        assert field.metadata["help"] in row
        if scope is not None:
            assert scope in line
            assert f"| {scope} |" in row

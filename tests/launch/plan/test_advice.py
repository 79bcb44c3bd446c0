"""Advice, and the commands that plans and advice end with."""

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from launch.cli import main
from launch.flags import add_flags, from_args
from launch.launch_config import ClusterConfig, ServerConfig
from launch.plan.advice import Goal, advise
from launch.plan.cards import DATA
from launch.plan.command import OVERLAP_FROM, launch_command
from launch.plan.plan import make_plan
from launch.plan.question import Question
from moe_ep.config import EngineConfig, validate
from moe_ep.config.overlap import DEFAULT_OVERLAP
from tests.tiny import tiny_checkpoint

SCHEMA = json.loads((DATA / "plan.schema.json").read_text(encoding="utf-8"))
GOAL = Goal(gpus=96, slo_tpot_ms=60, slo_ttft_ms=5000, input_len=4096, output_len=1024)


def started(command: str) -> EngineConfig:
    """The engine that ``moe-ep serve`` would start; raises what ``moe-ep check`` would say."""
    program, serve, *argv = shlex.split(command)
    assert (program, serve) == ("moe-ep", "serve")
    parser = argparse.ArgumentParser()
    for config in (EngineConfig, ClusterConfig, ServerConfig):
        add_flags(parser, config)
    engine = from_args(EngineConfig, parser.parse_args(argv))
    validate(engine)
    return engine


def test_pages_fit_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    argv = ["plan", "--gpu", "h200", "--gpus", "100", "--slo-tpot-ms", "60"]
    assert main([*argv, "--slo-ttft-ms", "8000"]) == 0
    page = capsys.readouterr().out.split("candidates:")[0]
    assert max(map(len, page.splitlines())) <= 80
    options = [line for line in page.splitlines() if " P " in line or " D " in line]
    assert len(options) == 10
    assert "GPUs unused" in page


def test_advice_meets_its_goals_and_says_what_limits():
    advice = advise(Question("deepseek-v3", gpu="h200"), GOAL)
    assert advice.options
    for option in advice.options:
        assert option.decode.tpot_ms.value <= GOAL.slo_tpot_ms
        assert option.prefill.ttft_ms.value <= GOAL.slo_ttft_ms
        assert option.prefill.fits
        assert option.decode.fits
        sizes = [p.setting.question.ep_size for p in (option.prefill, option.decode)]
        used = option.num_prefill * sizes[0] + option.num_decode * sizes[1]
        assert used + option.spare == GOAL.gpus
        assert option.limited_by.split(":")[0] in ("prefill", "decode")
    rates = [option.requests_per_s for option in advice.options]
    assert rates == sorted(rates, reverse=True)
    assert advice.num_candidates > 1000


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_the_advised_engine_planned_alone_is_the_same(part: str, capsys):
    option = advise(Question("deepseek-v3", gpu="h200"), GOAL).options[0]
    plan = getattr(option, part)
    assert make_plan(plan.setting.question) == plan
    rate = plan.tokens_per_s_per_gpu.value * plan.setting.question.ep_size
    if part == "decode":
        capacity = option.num_decode * rate / GOAL.output_len
    else:
        capacity = option.num_prefill * 0.7 * rate / GOAL.input_len
    assert option.requests_per_s <= capacity


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--gpu", "tpu"], "gpu: got 'tpu'"), (["--output-len", "200000"], "output_len"),
     (["--input-len", "163840"], "input_len: got 163840"),
     (["--gpus", "0"], "gpus"), (["--gpus", "1"], "at least 2"), (["--model", "nowhere"], "model"),
     (["--mtp-acceptance", "2"], "mtp_acceptance")],
)  # fmt: skip
def test_advice_refuses_what_no_candidate_could_mend(capsys, argv: list[str], said: str):
    assert main(["plan", "--gpus", "16", *argv]) == 2
    assert said in capsys.readouterr().err


def test_all_that_is_wrong_with_goals_and_question_is_said_at_once(capsys):
    argv = ["plan", "--gpus", "16", "--gpu", "tpu", "--slo-tpot-ms", "nan", "--slo-ttft-ms", "inf"]
    assert main([*argv, "--fabric", "string"]) == 2
    found = capsys.readouterr().err
    for text in ("slo_tpot_ms: got nan", "slo_ttft_ms: got inf", "gpu: got", "fabric: got"):
        assert text in found


def test_small_models_need_no_exchange():
    goal = Goal(gpus=2, slo_tpot_ms=50, slo_ttft_ms=5000, input_len=1024, output_len=512)
    best = advise(Question("deepseek-v2-lite", gpu="h200"), goal).options[0]
    assert {p.setting.question.ep_size for p in (best.prefill, best.decode)} == {1}


def test_goals_that_nothing_meets_leave_reasons(capsys):
    argv = ["plan", "--gpu", "h200", "--gpus", "32", "--slo-tpot-ms", "1"]
    assert main(argv) == 1
    assert "misses the time per output token" in " ".join(capsys.readouterr().out.split())
    assert main([*argv[:-1], "60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    broken = found | {"options": [found["options"][0] | {"commands": None}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)
    assert sum(found["dropped"].values()) < found["candidates"]


def test_advised_commands_start_what_was_planned(tmp_path: Path):
    """A built-in geometry has no weights, so its command was refused by ``moe-ep check``."""
    goal = replace(GOAL, slo_ttft_ms=6000)
    for option in advise(Question("deepseek-v3", gpu="h200"), goal).options:
        for plan in (option.prefill, option.decode):
            question = plan.setting.question
            engine = started(launch_command(question))
            assert engine.load_format == "dummy"
            assert engine.ep_size == question.ep_size
            assert engine.ep_num_redundant_experts == question.ep_num_redundant_experts
            assert engine.enable_eplb == (question.ep_num_redundant_experts > 0)
            assert engine.max_num_seqs == question.batch


def test_commands_say_what_a_plan_does_not_leave_to_defaults(tmp_path: Path):
    model = tiny_checkpoint("v3").path
    asked = Question(str(model / "config.json"), ep_size=2, gpu_memory_utilization=0.8)
    engine = started(launch_command(asked))
    assert engine.model == str(model)
    assert engine.load_format == "auto"
    assert engine.gpu_memory_utilization == 0.8
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "config.json").write_text((model / "config.json").read_text())
    spaced = started(launch_command(replace(asked, model=str(tmp_path / "a model"))))
    assert spaced.load_format == "dummy"


def test_planned_overlap_is_not_below_the_engines_threshold():
    """The engine overlaps decode steps from 128 tokens on unless told otherwise, so that a plan
    with fewer described steps that it would not run."""
    assert {"decode": DEFAULT_OVERLAP.decode, "prefill": DEFAULT_OVERLAP.prefill} == OVERLAP_FROM
    asked = Question("deepseek-v3", ep_size=32, batch=96, enable_two_batch_overlap=True)
    assert started(launch_command(asked)).tbo_token_threshold == 96
    assert started(launch_command(replace(asked, batch=128))).tbo_token_threshold is None
    short = replace(asked, phase="prefill", batch=1, context=256)
    assert started(launch_command(short)).tbo_token_threshold == 256

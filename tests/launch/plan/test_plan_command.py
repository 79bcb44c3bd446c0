"""``moe-ep plan`` as a user meets it: pages, JSON, refusals, advice."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest

from launch.cli import main
from launch.plan.advice import Goal, advise, launch_command
from launch.plan.balance import imbalance
from launch.plan.cards import DATA
from launch.plan.expert_load import placed_imbalance
from launch.plan.plan import make_plan
from launch.plan.question import Question
from moe_ep.config import ConfigError, ModelConfig
from moe_ep.config.model import GEOMETRIES
from moe_ep.progress import Stage

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((DATA / "plan.schema.json").read_text(encoding="utf-8"))
GOAL = Goal(gpus=96, slo_tpot_ms=60, slo_ttft_ms=5000, input_len=4096, output_len=1024)


def refused(**changes) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        make_plan(Question("deepseek-v3", **changes))
    return {problem.field: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2", "moonlight", "deepseek-v2-lite"])
def test_json_follows_its_schema(capsys, model: str, phase: str):
    argv = ["plan", "--model", model, "--gpu", "h200", "--phase", phase, "--batch", "2", "--json"]
    assert main(argv) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    assert (found["tpot_ms"] is None) == (phase == "prefill")
    names = {stage["stage"] for stage in found["step"]["stages"]}
    assert names <= {str(stage) for stage in Stage}
    step = found["step"]["ms"]
    assert step["low"] < step["value"] < step["high"]


def test_page_says_what_fits_how_fast_and_where(capsys):
    argv = ["plan", "--ep-size", "32", "--ep-num-redundant-experts", "32", "--topology"]
    assert main(argv) == 0
    page = capsys.readouterr().out
    for text in ("fits", "routed experts", "latent cache", "attention core", "combine wait",
                 "node 3", "24-31", "moe-ep serve", "imbalance 1.25"):  # fmt: skip
        assert text in page


def test_all_that_is_wrong_is_said_at_once():
    problems = refused(gpu="tpu", ep_size=7, batch=0, context=10**6, imbalance=0.5, fabric="string")
    assert set(problems) == {"gpu", "ep_size", "batch", "context", "imbalance", "fabric"}
    assert "h800" in problems["gpu"]
    assert "163840" in problems["context"]


def test_limits_of_the_exchange_are_refusals():
    assert "511" in refused(ep_size=128, batch=600)["batch"]
    assert "16" in refused(ep_size=12, ep_num_redundant_experts=8)["ep_size"]
    assert make_plan(Question("deepseek-v3", ep_size=128, batch=600, moe_a2a_backend="deepep_v2"))


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [({"attn_dp_size": 4}, "attn_dp_size", "tensor-parallel attention"),
     ({"ep_size": 0}, "ep_size", "at least 1"),
     ({"ep_size": -8}, "ep_size", "at least 1"),
     ({"ep_size": 24}, "ep_size", "divisor of 256"),
     ({"ep_num_redundant_experts": -1}, "ep_num_redundant_experts", "at least 0"),
     ({"batch": -1}, "batch", "at least 1"),
     ({"context": 0}, "context", "at least 1"),
     ({"mtp_tokens": -1}, "mtp_tokens", "at least 0"),
     ({"batch": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens", "64"),
     ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", "at least 1"),
     ({"prefill_load": 1.0}, "prefill_load", "below 1"),
     ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization", "above 0"),
     ({"kv_cache_dtype": "int4"}, "kv_cache_dtype", "fp8")],
)  # fmt: skip
def test_impossible_numbers_are_refused_by_name(changes: dict, field: str, said: str):
    problems = refused(**changes)
    assert set(problems) == {field}
    assert said in problems[field]


def test_a_model_is_a_name_a_config_or_its_directory(tmp_path: Path, capsys):
    config = json.loads((GEOMETRIES / "deepseek-v3.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plans = [make_plan(Question(str(path))) for path in (tmp_path, tmp_path / "config.json")]
    assert plans[0].memory == plans[1].memory == make_plan(Question("deepseek-v3")).memory


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "There is no file"), ("{", "readable JSON"), ("[]", "a JSON object"),
     ('{"model_type": "llama"}', "kv_lora_rank")],
)  # fmt: skip
def test_a_model_that_cannot_be_planned_is_refused(tmp_path: Path, capsys, text, said: str):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert main(["plan", "--model", str(file), "--gpu", "tpu", "--ep-size", "0"]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert "gpu: got 'tpu'" in found
    assert "ep_size: got 0" in found


def test_every_command_of_the_docs_runs(monkeypatch, tmp_path: Path, capsys):
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    commands = [line for line in text.split("```")[1].splitlines() if line.startswith("moe-ep")]
    assert len(commands) > 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for command in commands:
        assert main(command.split()[1:]) == 0, command
    first = capsys.readouterr().out.splitlines()[0].rstrip()
    assert first in text


def test_a_plan_needs_no_torch():
    code = (
        "import sys\nfrom launch.cli import main\nmain(['plan', '--gpu', 'gb200'])\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_recorded_loads_give_the_imbalance_of_a_placement_made_from_them(tmp_path: Path):
    """Worked by hand: 4 experts, 2 ranks. The sum over both steps is 6, 4, 4, 2, which two ranks
    share evenly as 6 + 2 and 4 + 4; in each step one of them then has 5 of 8 tokens."""
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"logical_count": [[[4, 1, 2, 1]], [[2, 3, 2, 1]]]}))
    small = replace(
        ModelConfig.from_path("deepseek-v3"), num_layers=1, first_k_dense_replace=0, num_experts=4
    )
    assert placed_imbalance(file, small, ep_size=2, num_slots=2) == pytest.approx(5 / 4)
    assert "4 experts found" in refused(expert_load=file)["expert_load"]
    assert "cannot be read" in refused(expert_load=tmp_path / "none.json")["expert_load"]
    assert set(refused(expert_load=file, imbalance=2.0)) == {"imbalance"}


def test_loads_of_the_whole_model_reach_the_plan_and_its_command(tmp_path: Path, capsys):
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"logical_count": [[1] * 255 + [40]] * 58}))
    plan = make_plan(Question("deepseek-v3", ep_size=32, expert_load=file))
    spread = Question("deepseek-v3", ep_size=32, expert_load=file, ep_num_redundant_experts=32)
    assert plan.setting.deployment.imbalance == pytest.approx((40 + 7) / (295 / 32))
    assert make_plan(spread).setting.deployment.imbalance < 1.2
    assert f"--init-expert-location {file}" in launch_command(make_plan(spread))


def test_published_imbalance_grows_with_ep_and_shrinks_with_redundancy():
    sizes = (1, 8, 12, 16, 32, 48, 64, 320)
    for is_balanced in (True, False):
        values = [imbalance(size, is_balanced=is_balanced) for size in sizes]
        assert values[0] == 1
        assert all(1 <= a <= b + 0.02 for a, b in pairwise(values))
    assert imbalance(32, is_balanced=True) == pytest.approx(1 / 0.8)
    assert imbalance(32, is_balanced=False) == pytest.approx(1 / 0.55)


def test_drafts_are_counted_as_rows_as_a_layer_and_as_gain():
    plain = make_plan(Question("deepseek-v3", ep_size=64, batch=64))
    one = make_plan(Question("deepseek-v3", ep_size=64, batch=64, mtp_tokens=1))
    two = make_plan(Question("deepseek-v3", ep_size=64, batch=64, mtp_tokens=2))
    assert plain.step_ms.value < one.step_ms.value < 2 * plain.step_ms.value
    assert one.tpot_ms.value == pytest.approx(one.step_ms.value / 1.85)
    layer = one.step.layer_us
    assert layer < one.step.outside["drafts"].us < 2.5 * layer
    assert 1.3 < two.step.outside["drafts"].us / one.step.outside["drafts"].us < 2.2


def test_prompts_longer_than_a_step_come_in_chunks_and_wait():
    asked = Question("deepseek-v3", gpu="h200", ep_size=32, phase="prefill", batch=1, context=16384)
    whole = make_plan(replace(asked, prefill_load=0))
    chunked = make_plan(replace(asked, prefill_load=0, max_num_batched_tokens=4096))
    queued = make_plan(replace(asked, prefill_load=0.5))
    assert whole.wait_ms == 0
    assert whole.ttft_ms.value == pytest.approx(whole.step_ms.value)
    assert chunked.ttft_ms.value == pytest.approx(4 * chunked.step_ms.value)
    # Each chunk makes the keys of those before it again, and is a step of its own.
    assert 1 < chunked.ttft_ms.value / whole.ttft_ms.value < 1.25
    assert chunked.memory.cache_tokens > whole.memory.cache_tokens
    # Half busy, an M/D/1 queue makes a job wait half its own time.
    assert queued.ttft_ms.value == pytest.approx(1.5 * whole.ttft_ms.value)


def test_many_nodes_take_few_lines_and_ports_are_named(capsys):
    main(["plan", "--ep-size", "128", "--batch", "16"])
    page = capsys.readouterr().out
    for text in ("node 0", "node 1 ", "…", "node 15", "8000", "6379"):
        assert text in page
    assert "node 7" not in page
    main(["plan", "--ep-size", "8", "--batch", "16", "--gpu", "h200"])
    assert "6379" not in capsys.readouterr().out


def test_pages_fit_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    argv = ["plan", "--gpu", "h200", "--gpus", "100", "--slo-tpot-ms", "60"]
    assert main([*argv, "--slo-ttft-ms", "8000"]) == 0
    page = capsys.readouterr().out.split("candidates:")[0]
    assert max(map(len, page.splitlines())) <= 80
    options = [line for line in page.splitlines() if " P " in line or " D " in line]
    assert len(options) == 10
    assert "GPUs unused" in page


def test_a_plan_can_be_drawn(tmp_path: Path, capsys):
    file = tmp_path / "plan.svg"
    assert main(["plan", "--gpu", "h200", "--plot", str(file)]) == 0
    assert file.read_text(encoding="utf-8").startswith("<?xml")
    assert main(["plan", "--gpu", "h200", "--plot", str(tmp_path / "plan")]) == 2
    assert "plot" in capsys.readouterr().err


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
    assert "--ep-size" in launch_command(advice.options[0].decode)


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--gpu", "tpu"], "gpu: got 'tpu'"), (["--output-len", "200000"], "output_len"),
     (["--gpus", "0"], "gpus"), (["--model", "nowhere"], "model"),
     (["--mtp-acceptance", "2"], "mtp_acceptance")],
)  # fmt: skip
def test_advice_refuses_what_no_candidate_could_mend(capsys, argv: list[str], said: str):
    assert main(["plan", "--gpus", "16", *argv]) == 2
    assert said in capsys.readouterr().err


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

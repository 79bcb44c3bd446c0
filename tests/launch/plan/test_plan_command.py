"""``moe-ep plan`` as a user meets it: pages, JSON, refusals, advice."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest

from launch.cli import main
from launch.plan.advice import Goal, advise, launch_command
from launch.plan.balance import imbalance
from launch.plan.cards import DATA
from launch.plan.plan import make_plan
from launch.plan.question import Question, recorded_imbalance
from moe_ep.config import ConfigError
from moe_ep.progress import Stage

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


def test_attention_over_fewer_groups_is_refused(capsys):
    assert main(["plan", "--ep-size", "16", "--attn-dp-size", "4"]) == 2
    assert "attn_dp_size" in capsys.readouterr().err


def test_a_plan_needs_no_torch():
    code = (
        "import sys\nfrom launch.cli import main\nmain(['plan', '--gpu', 'gb200'])\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_recorded_load_gives_the_imbalance(tmp_path: Path):
    file = tmp_path / "load.json"
    file.write_text(json.dumps([[3, 1, 1, 1], [2, 2, 2, 2]]))
    assert recorded_imbalance(file, 2, 2) == pytest.approx((4 / 3 + 1) / 2)
    assert set(refused(expert_load=file)) == {"expert_load"}


def test_published_imbalance_grows_with_ep_and_shrinks_with_redundancy():
    sizes = (1, 8, 12, 16, 32, 48, 64, 320)
    for is_balanced in (True, False):
        values = [imbalance(size, is_balanced=is_balanced) for size in sizes]
        assert values[0] == 1
        assert all(1 <= a <= b + 0.02 for a, b in pairwise(values))
    assert imbalance(32, is_balanced=True) == pytest.approx(1 / 0.8)
    assert imbalance(32, is_balanced=False) == pytest.approx(1 / 0.55)


def test_drafted_tokens_are_counted_as_rows_and_as_gain():
    plain = make_plan(Question("deepseek-v3", ep_size=64, batch=64))
    drafted = make_plan(Question("deepseek-v3", ep_size=64, batch=64, mtp_tokens=1))
    assert plain.step_ms.value < drafted.step_ms.value < 2 * plain.step_ms.value
    assert drafted.tpot_ms.value == pytest.approx(drafted.step_ms.value / 1.85)


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


def test_goals_that_nothing_meets_leave_reasons(capsys):
    argv = ["plan", "--gpu", "h200", "--gpus", "32", "--slo-tpot-ms", "1"]
    assert main(argv) == 1
    assert "misses the time per output token" in " ".join(capsys.readouterr().out.split())
    assert main([*argv[:-1], "60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found["options"][0]["decode"], SCHEMA)
    assert sum(found["dropped"].values()) < found["candidates"]

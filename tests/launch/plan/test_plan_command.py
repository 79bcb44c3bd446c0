"""``moe-ep plan`` as a user meets it: pages, JSON, refusals."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest

from launch.cli import main
from launch.plan.balance import imbalance
from launch.plan.cards import DATA
from launch.plan.command import launch_command
from launch.plan.expert_load import placed_imbalance
from launch.plan.plan import make_plan
from launch.plan.question import Question
from moe_ep.config import ConfigError, ModelConfig
from moe_ep.config.model import GEOMETRIES
from moe_ep.progress import Stage

SCHEMA = json.loads((DATA / "plan.schema.json").read_text(encoding="utf-8"))


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


def test_json_has_the_place_of_each_rank_where_it_is_asked_for(capsys):
    """The flag used to be dropped with --json."""
    argv = ["plan", "--gpu", "h200", "--ep-size", "16", "--json"]
    main(argv)
    assert "topology" not in json.loads(capsys.readouterr().out)
    main([*argv, "--topology"])
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    assert found["topology"][9] == {
        "rank": 9, "node": "node 1", "gpu": 1, "first_slot": 144, "last_slot": 159,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "fields"),
    [(["--slo-tpot-ms", "20", "--input-len", "9"], ["input_len", "slo_tpot_ms"]),
     (["--gpus", "16", "--ep-size", "16", "--plot", "x.png", "--topology"],
      ["ep_size", "plot", "topology"]),
     (["--validate", "--json", "--gpu", "h200"], ["gpu", "json"])],
)  # fmt: skip
def test_flags_that_would_not_be_read_are_refused(capsys, argv: list[str], fields: list[str]):
    assert main(["plan", *argv]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.split(":")[0].strip(" -") for line in lines] == fields
    assert all("nothing with" in line for line in lines)


def test_page_says_what_fits_how_fast_and_where(capsys):
    argv = ["plan", "--ep-size", "32", "--ep-num-redundant-experts", "32", "--topology"]
    assert main(argv) == 0
    page = capsys.readouterr().out
    for text in ("fits", "routed experts", "latent cache", "attention core", "combine wait",
                 "node 3", "24-31", "moe-ep serve", "imbalance 1.25"):  # fmt: skip
        assert text in page
    assert "per node" in " ".join(page.split())


def test_all_that_is_wrong_is_said_at_once():
    problems = refused(gpu="tpu", ep_size=7, batch=0, context=10**6, imbalance=0.5, fabric="string")
    assert set(problems) == {"gpu", "ep_size", "batch", "context", "imbalance", "fabric"}
    assert "h800" in problems["gpu"]
    assert "163840" in problems["context"]


def test_limits_of_the_exchange_and_files_are_said_with_the_rest(tmp_path: Path):
    """A batch above the capacity used to be told only once all else was right, and of several
    limits of the exchange only the first."""
    problems = refused(gpu="tpu", ep_size=24, batch=600, context=10**6, expert_load=tmp_path / "x")
    assert set(problems) == {"gpu", "ep_size", "batch", "context", "expert_load"}
    assert "at most 511" in problems["batch"]
    both = refused(ep_size=12, ep_num_redundant_experts=8, batch=600)
    assert set(both) == {"ep_size", "batch"}
    assert "V1 kernels exist for 2, 4, 8" in both["ep_size"]


def test_limits_of_the_exchange_are_refusals():
    assert "511" in refused(ep_size=128, batch=600)["batch"]
    assert "511" in refused(ep_size=128, batch=600, phase="prefill", context=64)["batch"]
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
     ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", "at least 64"),
     ({"imbalance": float("inf")}, "imbalance", "finite"),
     ({"imbalance": float("nan")}, "imbalance", "at least 1"),
     ({"prefill_load": 1.0}, "prefill_load", "below 1"),
     ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization", "above 0"),
     ({"kv_cache_dtype": "int4"}, "kv_cache_dtype", "fp8")],
)  # fmt: skip
def test_impossible_numbers_are_refused_by_name(changes: dict, field: str, said: str):
    problems = refused(**changes)
    assert set(problems) == {field}
    assert said in problems[field]


def test_a_model_is_a_name_a_config_or_its_directory(tmp_path: Path):
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
    assert set(refused(expert_load=file, imbalance=2.0)) == {"imbalance", "expert_load"}


def test_loads_of_the_whole_model_reach_the_plan_and_its_command(tmp_path: Path):
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"logical_count": [[1] * 255 + [40]] * 58}))
    plan = make_plan(Question("deepseek-v3", ep_size=32, expert_load=file))
    spread = Question("deepseek-v3", ep_size=32, expert_load=file, ep_num_redundant_experts=32)
    assert plan.setting.deployment.imbalance == pytest.approx((40 + 7) / (295 / 32))
    assert make_plan(spread).setting.deployment.imbalance < 1.2
    command = launch_command(spread)
    assert f"--init-expert-location {file}" in command
    assert "--enable-eplb" not in command


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


def test_the_last_step_of_a_prompt_takes_the_time_of_its_tokens():
    """One token more than fits into a step used to count as another full step."""
    asked = Question("deepseek-v3", gpu="h200", ep_size=32, phase="prefill", batch=1,
                     prefill_load=0, max_num_batched_tokens=4096)  # fmt: skip
    one = make_plan(replace(asked, context=4096)).ttft_ms.value
    more = make_plan(replace(asked, context=4160)).ttft_ms.value
    assert one < more < 1.4 * one
    assert make_plan(replace(asked, context=8192)).ttft_ms.value > 1.9 * one


def test_requests_hold_whole_blocks_of_the_cache():
    needed = make_plan(Question("deepseek-v3", gpu="h200", batch=3, context=65)).cache_tokens_needed
    assert needed == 3 * 128


def test_many_nodes_take_few_lines_and_ports_are_named(capsys):
    main(["plan", "--ep-size", "128", "--batch", "16"])
    page = capsys.readouterr().out
    for text in ("node 0", "node 1 ", "…", "node 15", "8000", "6379"):
        assert text in page
    assert "node 7" not in page
    main(["plan", "--ep-size", "8", "--batch", "16", "--gpu", "h200"])
    assert "6379" not in capsys.readouterr().out


def test_a_plan_can_be_drawn(tmp_path: Path, capsys):
    file = tmp_path / "plan.svg"
    assert main(["plan", "--gpu", "h200", "--plot", str(file)]) == 0
    assert file.read_text(encoding="utf-8").startswith("<?xml")
    assert main(["plan", "--gpu", "h200", "--plot", str(tmp_path / "plan")]) == 2
    assert "plot" in capsys.readouterr().err
    assert main(["plan", "--gpu", "h200", "--plot", str(tmp_path / "none" / "x.png")]) == 2
    assert "plot: got" in capsys.readouterr().err

"""The fit: it finds what it should, sees nothing that it is tested on, and is the stored one."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from launch.plan import fit as fitting
from launch.plan.cards import cards
from launch.plan.parameters import FILE, MEANING, family
from launch.plan.plot import draw_outcomes
from launch.plan.published import records
from launch.plan.targets import (
    DECODE,
    EXCHANGE,
    KERNEL,
    PREFILL,
    comparable,
    excluded,
    product_targets,
    target,
)
from launch.plan.validate import Outcome, leave_one_source_out, median_error
from moe_ep.config import ConfigError


def outcomes_of(kind: str) -> list[Outcome]:
    return [item for item in leave_one_source_out() if item.target.kind == kind]


def test_the_stored_parameters_are_a_refit():
    stored, made = json.loads(FILE.read_text(encoding="utf-8")), fitting.stored()
    assert set(stored["without"]) == {t.group for t in comparable()}
    fits = [("families", None), *(("without", group) for group in made["without"])]
    for part, group in fits:
        old, new = (data[part][group] if group else data[part] for data in (stored, made))
        for name, parameters in new.items():
            assert old[name] == pytest.approx(parameters, rel=0.01), (group, name)
            assert set(parameters) == set(MEANING)
    for kind, values in made["ranges"].items():
        assert stored["ranges"][kind] == pytest.approx(values, rel=0.02)


def test_a_fit_finds_the_parameters_of_made_up_records_despite_an_outlier():
    """Records that the model itself would publish with other parameters, one of them wrong."""
    targets = [t for t in comparable() if t.kind == KERNEL and t.family == "hopper"]
    truth = family("hopper") | {"launch_us": 4.5, "gemm_memory": 0.7}
    made = [replace(t, published=t.predict(truth)) for t in targets]
    made[3] = replace(made[3], published=made[3].published * 30)
    found = fitting.fit(made)["hopper"]
    for name in ("launch_us", "gemm_memory"):
        assert found[name] == pytest.approx(truth[name], rel=0.05), name


@pytest.mark.parametrize("kind", [DECODE, PREFILL, KERNEL, EXCHANGE])
def test_unseen_sources_are_predicted_within_15_percent_in_the_median(kind: str):
    assert median_error(outcomes_of(kind)) <= 0.15


def test_no_record_is_predicted_by_a_fit_that_has_seen_its_source():
    """Its published value may be anything: the prediction stays."""
    targets = comparable()
    group = "Ant Group H20"
    spoiled = [replace(t, published=t.published * 9) if t.group == group else t for t in targets]
    seen = fitting.fit(t for t in spoiled if t.group != group)
    for outcome in leave_one_source_out():
        if outcome.target.group == group:
            assert outcome.predicted == pytest.approx(outcome.target.predict(seen["hopper"]))


def test_every_record_is_compared_or_has_a_reason():
    compared = len(comparable()) - len(product_targets())
    left_out = sum(count for _, _, count in excluded())
    assert compared + left_out == len(records())
    assert all(reason for _, reason, _ in excluded())
    assert all(isinstance(target(r), str) for r in records() if "Ascend" in r.gpu)


def test_shares_of_a_peak_stay_below_it():
    for name in fitting.FAMILIES:
        for key, value in family(name).items():
            assert value > 0
            if key in fitting.SHARES or key.endswith(("_nvlink", "_fabric")):
                assert value < 1.01


def test_parameters_without_records_keep_their_prior():
    nothing = fitting.fit([])
    assert nothing["hopper"] == nothing["blackwell"]
    assert nothing["hopper"]["launch_us"] == fitting.KERNEL_PRIORS["launch_us"]


def test_plot_of_the_validation_names_every_source(tmp_path: Path):
    file = tmp_path / "validation.svg"
    draw_outcomes(leave_one_source_out(), file)
    assert file.read_text(encoding="utf-8").count("<use ") > len(leave_one_source_out())
    with pytest.raises(ConfigError, match=r"plot.*\.svg"):
        draw_outcomes(leave_one_source_out(), tmp_path / "validation.doc")


def test_a_validation_needs_no_scipy():
    code = (
        "import sys\nfrom launch.cli import main\nmain(['plan', '--validate'])\n"
        "assert not {'torch', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_every_number_of_a_card_has_a_source():
    for card in cards().values():
        numbers = {field.name for field in fields(card)} - {"name", "family", "sources"}
        assert {name for name, _ in card.sources} == numbers
        assert all(source for _, source in card.sources)

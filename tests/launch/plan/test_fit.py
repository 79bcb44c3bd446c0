"""The fit: it finds what it should, sees nothing that it is tested on, and is the stored one."""

import json
from dataclasses import replace

import numpy as np
import pytest

from launch.plan import fit as fitting
from launch.plan.least_squares import minimise
from launch.plan.parameters import FILE, MEANING, family
from launch.plan.plot import svg
from launch.plan.published import records
from launch.plan.targets import DECODE, EXCHANGE, PREFILL, target
from launch.plan.validate import Outcome, leave_one_source_out, median_error


def outcomes_of(kind: str) -> list[Outcome]:
    return [item for item in leave_one_source_out() if item.target.kind == kind]


def test_least_squares_finds_parameters_despite_an_outlier():
    x = np.linspace(1, 4, 12)
    y = 2.0 * x**1.5
    y[3] *= 30

    def residuals(logs: np.ndarray) -> np.ndarray:
        scale, power = np.exp(logs)
        return 50 * np.log(scale * x**power / y)

    found = np.exp(minimise(residuals, np.log([1.0, 1.0])))
    assert found == pytest.approx([2.0, 1.5], rel=0.02)


def test_the_stored_parameters_are_a_refit():
    stored, made = json.loads(FILE.read_text(encoding="utf-8")), fitting.stored()
    for name, parameters in made["families"].items():
        assert stored["families"][name] == pytest.approx(parameters, rel=0.01)
        assert set(parameters) == set(MEANING)
    for kind, values in made["ranges"].items():
        assert stored["ranges"][kind] == pytest.approx(values, rel=0.02)


@pytest.mark.parametrize("kind", [DECODE, PREFILL, EXCHANGE])
def test_unseen_sources_are_predicted_within_15_percent_in_the_median(kind: str):
    assert median_error(outcomes_of(kind)) <= 0.15


def test_no_record_is_predicted_by_a_fit_that_has_seen_its_source():
    """Its published value may be anything: the prediction stays."""
    targets = fitting.comparable()
    group = "Ant Group H20"
    spoiled = [replace(t, published=t.published * 9) if t.group == group else t for t in targets]
    seen = fitting.fit(t for t in spoiled if t.group != group)
    for outcome in leave_one_source_out():
        if outcome.target.group == group:
            assert outcome.predicted == pytest.approx(outcome.target.predict(seen["hopper"]))


def test_every_record_is_compared_or_has_a_reason():
    compared = len(fitting.comparable()) - len(fitting.product_targets())
    left_out = sum(count for _, _, count in fitting.excluded())
    assert compared + left_out == len(records())
    assert all(reason for _, reason, _ in fitting.excluded())
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


def test_plot_has_a_dot_for_every_record():
    drawn = svg(leave_one_source_out())
    sources = {outcome.target.group for outcome in leave_one_source_out()}
    assert drawn.count("<circle") == len(leave_one_source_out()) + len(sources)
    assert "nan" not in drawn

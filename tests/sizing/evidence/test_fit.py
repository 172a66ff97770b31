"""The fit: it finds known constants again, ignores an odd run, and predicts as the models do."""

import math
from dataclasses import asdict
from statistics import median

import numpy as np
import pytest

from sizing.evidence import fit
from sizing.evidence.truths import calibrating, counts, gpu_of, missing_bytes, predictable, step_of
from sizing.models.constants import MIB, Constants
from sizing.models.fitted import fitted
from sizing.models.step_time import roofline

TRUTHS = predictable("throughput")
ROWS = fit.rows_of(TRUTHS)


def made_up(found: fit.Values) -> fit.Rows:
    """The published rows, had they been as fast as these constants say."""
    fields = {name: getattr(ROWS, name) for name in ROWS.__slots__}
    return fit.Rows(**{**fields, "measured": fit.seconds(ROWS, found)})


def known() -> fit.Values:
    exponents = np.linspace(0.1, 0.4, ROWS.features.shape[1])
    return np.concatenate([np.log([1.1, 1.4, 1.2, 9.0]), exponents])


def test_the_fit_finds_the_constants_that_made_the_rows() -> None:
    assert fit.fit(made_up(known())) == pytest.approx(known(), abs=0.1)


def test_one_odd_run_does_not_move_the_constants() -> None:
    rows = made_up(known())
    rows.measured[0] *= 10
    assert fit.fit(rows) == pytest.approx(known(), abs=0.12)


def shipped() -> fit.Values:
    """The constants of fitted.json, in the order of the fit."""
    factors = [fitted().time_factors[name] for name in fit.PRECISIONS]
    return np.array(
        [*map(math.log, (*factors, fitted().traffic_passes)), *fitted().exponents.values()]
    )


def test_the_constants_that_ship_are_what_the_fit_gives() -> None:
    assert shipped() == pytest.approx(fit.fit(ROWS), rel=2e-3)
    for kind, interval in fitted().intervals.items():
        assert asdict(interval) == pytest.approx(asdict(fit.expected(kind)), rel=2e-3), kind
    assert fitted().runs == {gpu: [t.gpu for t in TRUTHS].count(gpu) for gpu in fitted().runs}
    missing = median(map(missing_bytes, calibrating()))
    assert fitted().workspace_mib == pytest.approx(missing / MIB, rel=2e-3)


def test_published_launches_lie_in_the_range_of_their_host() -> None:
    """At batch 1 the GPU waits for its host, which starts one kernel after another."""
    hosts: dict[str, list[float]] = {}
    for truth in predictable("launches"):
        kernels = counts()[truth.model][truth.counted_as]["kernels_per_step"]
        if truth.precision.startswith("forward") and truth.batch == 1:
            hosts.setdefault(truth.host, []).append(truth.measured / 1000 / kernels)
    for launch in fitted().launches.values():
        for host in hosts.keys() & set(launch.hosts.split(" to ")):
            assert launch.low < median(hosts[host]) < launch.high
    assert len(hosts) > 1


def test_the_model_predicts_with_the_constants_as_the_fit_does() -> None:
    ours = [roofline(step_of(t), gpu_of(t), Constants(), found=fitted()).seconds for t in TRUTHS]
    assert ours == pytest.approx(list(fit.seconds(ROWS, shipped())), rel=1e-6)


def test_a_prediction_without_a_model_has_not_seen_it() -> None:
    """Leaving out changes what is predicted of it, and the more so the odder it is."""
    everything = fit.fit(ROWS)
    seen = ROWS.measured / fit.seconds(ROWS, everything)
    unseen = np.array(fit.without("model"))
    assert np.abs(np.log(unseen)).sum() > np.abs(np.log(seen)).sum()


def test_a_model_under_two_names_and_a_chip_in_two_cards_are_left_out_together() -> None:
    names = {truth.architecture for truth in TRUTHS if truth.model.startswith("bert_large")}
    assert names == {"bert_large"}
    assert {t.chip for t in TRUTHS if "A100" in t.gpu} == {"GA100"}
    a10g = ("growth_dense", "GA102")
    assert all(fit.is_like("model and chip", t, a10g) for t in TRUTHS if "3090" in t.gpu)


def test_what_is_left_out_does_not_weigh_on_the_fit() -> None:
    kept = [truth for truth in TRUTHS if truth.lab != "Lambda"]
    left_out = next(i for i, truth in enumerate(TRUTHS) if truth.lab == "Lambda")
    predicted = fit.seconds(ROWS, fit.fit(fit.rows_of(kept)))[left_out]
    assert fit.without("lab")[left_out] == pytest.approx(ROWS.measured[left_out] / predicted)


def test_an_interval_holds_four_runs_of_five() -> None:
    ratios = [0.5 + n / 100 for n in range(101)]
    found = fit.interval(ratios)
    inside = [ratio for ratio in ratios if found.low <= ratio <= found.high]
    assert 0.78 <= len(inside) / len(ratios) <= 0.86


@pytest.mark.parametrize("what", ["lab", "model and chip", "model"])
def test_four_runs_of_five_of_a_left_out_lab_model_and_chip_lie_in_the_range(what: str) -> None:
    inside, rows = fit.covered(what)
    assert inside >= 0.8 * rows


def test_few_runs_give_a_wide_interval_that_holds_the_prediction() -> None:
    found = fit.interval([1.2, 1.4])
    assert (found.low, found.high, found.runs) == (1.0, 1.4, 2)

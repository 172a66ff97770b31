"""What the fit gives is what is committed; launches come from steps that wait for them."""

import json
from statistics import median
from typing import Any

import pytest

from benchmarks import evidence
from sizing.evidence.truths import predictable
from sizing.models.fitted import FITTED_FILE, fitted


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested objects by their path."""
    if not isinstance(value, dict):
        return {name: value}
    return {path: v for key, one in value.items() for path, v in flat(one, f"{name} {key}").items()}


def test_the_committed_constants_are_what_the_fit_gives() -> None:
    there = flat(json.loads(FITTED_FILE.read_text()))
    fresh = flat(evidence.to_json(evidence.fitted_again()))
    assert fresh.keys() == there.keys()
    for name, value in there.items():
        # The last digit may differ.
        known = pytest.approx(value, rel=2e-3) if isinstance(value, float) else value
        assert fresh[name] == known, name


def test_a_step_that_keeps_the_gpu_busy_says_nothing_about_launches() -> None:
    bound = {t.name: evidence.is_launch_bound(t, fitted()) for t in predictable("launches")}
    assert bound["MatrixSP mobilenet_v3_small RTX 5090"]
    assert not bound["MatrixSP vgg19 RTX 5090"]


def test_an_old_server_launches_slower_than_a_desktop_of_2025() -> None:
    rows = evidence.by_host(fitted())
    desktop, server = rows["a desktop of 2025"], rows["Xeon E5-2698 v4"]
    assert median(server) > 2 * median(desktop)


@pytest.mark.parametrize("gpu", evidence.HOSTS)
def test_every_host_of_ec2_has_a_range_of_published_launches(gpu: str) -> None:
    found = fitted().launches[gpu]
    assert 5e-6 < found.low < found.likely < found.high < 120e-6

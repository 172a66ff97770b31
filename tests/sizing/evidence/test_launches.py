"""Launch costs come from steps in which the GPU waits for its host, and from nothing else."""

from statistics import median

import pytest

from sizing.evidence import launches
from sizing.evidence.truths import predictable
from sizing.models.fitted import fitted


def test_a_step_that_keeps_the_gpu_busy_says_nothing_about_launches() -> None:
    bound = {t.name: launches.is_launch_bound(t, fitted()) for t in predictable("launches")}
    assert bound["MatrixSP mobilenet_v3_small RTX 5090"]
    assert not bound["MatrixSP vgg19 RTX 5090"]


def test_an_old_server_launches_slower_than_a_desktop_of_2025() -> None:
    rows = launches.by_host(fitted())
    desktop, server = rows["a desktop of 2025"], rows["Xeon E5-2698 v4"]
    assert median(server) > 2 * median(desktop)


@pytest.mark.parametrize("gpu", launches.HOSTS)
def test_every_host_of_ec2_has_a_range_of_published_launches(gpu: str) -> None:
    found = fitted().launches[gpu]
    assert 5e-6 < found.low < found.likely < found.high < 120e-6

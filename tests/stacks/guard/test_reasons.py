"""A bucket that refuses the Guard, and one that does not answer it."""

from typing import Any

import pytest

from stacks.guard.handler import GuardError
from tests.stacks.guard.conftest import refuse, unreachable
from tests.stacks.guard.scene import Scene

EVERYTHING = "GetObject head.json, GetObject guard.json, PutObject guard.json"


def boots_that_end(scene: Scene, hours: float, **settings: Any) -> float:
    """Machines end themselves, with a call after each, until the fleet is at zero; when it is."""
    for boot in range(9):
        scene.maintain()
        scene.end(*scene.live())
        with pytest.raises(GuardError):
            scene.tick(hours_later=boot * hours, MAX_USD=5, **settings)
        if scene.capacity() == 0:
            break
    return boot * hours


@pytest.mark.parametrize(
    ("code", "calls", "deadline"),
    [
        ("AccessDenied", "GetObject head.json, GetObject guard.json", 0),
        # No other market is tried while the head, which it is chosen by, is unknown.
        ("NoSuchBucket", EVERYTHING, 48),
        ("KMS.DisabledException", EVERYTHING, 0),
        ("KMS.KMSInvalidStateException", EVERYTHING, 0),
    ],
)
def test_a_bucket_that_refuses_ends_a_fleet_whose_machines_end_themselves(
    scene: Scene, code: str, calls: str, deadline: float, before: Any
) -> None:
    scene.tick(hours_later=-0.1)
    before(calls, refuse(code, 403))
    now = boots_that_end(scene, 0.1, DEADLINE_HOURS=deadline)
    assert scene.capacity() == 0
    for later in (0.1, 0.2):  # and no further mail, though nothing can be kept
        with pytest.raises(GuardError):
            scene.tick(hours_later=now + later, MAX_USD=5)
    (mail,) = scene.mails()
    assert "3 attempts in a row committed nothing" in mail and f"({code})" in mail
    before("nothing", refuse(code, 403))
    scene.set_capacity(1)
    scene.maintain()
    scene.tick(hours_later=now + 0.3)
    assert scene.capacity() == 1, "a person has mended it and resumes the run"


def test_a_bucket_that_does_not_answer_ends_nothing(scene: Scene, before: Any) -> None:
    before(EVERYTHING, unreachable)
    boots_that_end(scene, 0.1)
    assert scene.capacity() == 1 and not scene.mails()

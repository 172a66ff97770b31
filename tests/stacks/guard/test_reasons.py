"""A bucket that refuses the Guard, and one that does not answer it."""

from typing import Any

import pytest

from stacks.guard.handler import GuardError
from tests.stacks.guard.conftest import refuse, unreachable
from tests.stacks.guard.scene import Scene


@pytest.mark.parametrize(
    ("code", "is_written"),
    [("AccessDenied", True), ("NoSuchBucket", False), ("KMS.DisabledException", True)],
)
def test_a_bucket_that_refuses_ends_a_fleet_whose_machines_end_themselves(
    scene: Scene, code: str, is_written: bool, before: Any
) -> None:
    calls = "GetObject head.json, GetObject guard.json" + ", PutObject guard.json" * (
        not is_written
    )
    before(calls, refuse(code, 403))
    for boot in range(40):
        scene.maintain()
        scene.end(*scene.live())
        with pytest.raises(GuardError):
            scene.tick(hours_later=boot * 0.1, MAX_USD=5)
        if scene.capacity() == 0:
            break
    for later in range(1, 5):  # and no further mail, though nothing can be kept
        with pytest.raises(GuardError):
            scene.tick(hours_later=boot * 0.1 + later * 0.1, MAX_USD=5)
    (mail,) = scene.mails()
    assert "attempts in a row committed nothing" in mail and "S3 refuses the Guard" in mail


def test_a_bucket_that_does_not_answer_ends_nothing(scene: Scene, before: Any) -> None:
    before("GetObject head.json, GetObject guard.json, PutObject guard.json", unreachable)
    for boot in range(9):
        scene.maintain()
        scene.end(*scene.live())
        with pytest.raises(GuardError):
            scene.tick(hours_later=boot * 0.1)
    assert scene.capacity() == 1 and not scene.mails()

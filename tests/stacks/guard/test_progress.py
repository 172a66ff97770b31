"""Silence: what a machine gets done before its first heartbeat is a sign of life, and no more."""

import re

import pytest
from botocore.exceptions import ConnectTimeoutError

from contract.keys import progress_key
from contract.progress import progress_record
from stacks.guard import records
from stacks.guard.handler import GuardError
from stacks.guard.settings import quick_client
from tests.stacks.guard.scene import Scene

NOTHING = {"action": "none", "reason": "no reason to stop"}
HOUR, GIB = 3600, 1024**3
# 900 GiB at the 125 MiB/s of a volume as large as that, in two hours.
SYNC_SECONDS, BYTES_PER_SECOND = 2 * HOUR, 900 * GIB / (2 * HOUR)


def send(scene: Scene, machine: str, *, step: str = "dataset", files: int = 0, size: float) -> None:
    record, key = progress_record(step, files, int(size)), f"runs/run-1/{progress_key(machine)}"
    quick_client("s3").put_object(Bucket="runs", Key=key, Body=record)


def test_a_sync_of_two_hours_goes_on_and_is_ended_an_hour_after_its_last_byte(
    scene: Scene,
) -> None:
    (machine,) = scene.live()
    for seconds in (0, 600, 1800, 3000, 3720, 4320, 5400, 6600, SYNC_SECONDS):
        send(scene, machine, size=seconds * BYTES_PER_SECOND)
        assert scene.tick(hours_later=seconds / HOUR) == NOTHING, seconds
    for seconds in (600, 3000, 3500):  # it writes the same again and again
        send(scene, machine, size=SYNC_SECONDS * BYTES_PER_SECOND)
        assert scene.tick(hours_later=(SYNC_SECONDS + seconds) / HOUR) == NOTHING
    done = scene.tick(hours_later=(SYNC_SECONDS + 3750) / HOUR)
    assert done["action"] == "to-zero"
    assert re.fullmatch(r"no heartbeat for 37\d\d s while an instance runs", done["reason"])


@pytest.mark.parametrize("counts", [[(1, 0), (2, 0), (3, 0)], [(0, 1), (0, 2), (0, 3)]])
def test_files_or_bytes_that_advance_are_enough(
    scene: Scene, counts: list[tuple[int, int]]
) -> None:
    (machine,) = scene.live()
    for number, (files, size) in enumerate(counts, start=1):
        send(scene, machine, step="program", files=files, size=size)
        assert scene.tick(hours_later=0.9 * number) == NOTHING


def test_each_step_counts_from_zero_and_a_restarted_one_counts_beyond_what_it_had(
    scene: Scene,
) -> None:
    (machine,) = scene.live()
    send(scene, machine, step="program", files=500, size=5e9)
    scene.tick(hours_later=0.9)
    send(scene, machine, step="dataset", files=1, size=1)
    assert scene.tick(hours_later=1.8) == NOTHING
    for number in range(1, 4):  # a machine that restarts for ever, and gets as far each time
        send(scene, machine, step="program", files=100 * number, size=1e9 * number)
        done = scene.tick(hours_later=1.8 + 0.4 * number)
    assert done["action"] == "to-zero"


def test_the_progress_of_a_machine_that_is_gone_does_not_keep_its_replacement(
    scene: Scene,
) -> None:
    (first,) = scene.live()
    send(scene, first, size=1)
    scene.tick()
    scene.take_back(first)
    scene.maintain()
    assert scene.tick(hours_later=0.9) == NOTHING
    send(scene, first, size=2)
    assert scene.tick(hours_later=1.1)["action"] == "to-zero"


def test_a_heartbeat_after_the_sync_counts_as_before(scene: Scene) -> None:
    (machine,) = scene.live()
    send(scene, machine, size=1)
    scene.tick(hours_later=0.5)
    scene.head("running")
    assert scene.tick(hours_later=1.4) == NOTHING
    assert scene.tick(hours_later=1.6)["action"] == "to-zero"


def test_a_step_of_the_boot_that_is_done_is_a_sign_of_life_once(scene: Scene) -> None:
    """A boot of 40 minutes and then half an hour of waiting for the dataset: nothing else tells."""
    (machine,) = scene.live()
    scene.tick()
    for hours_later, step in ((0.9, "run-env"), (1.8, "torch")):
        scene.write(f"events/20261128T000000.0Z-{machine}-boot-{step}.json", {})
        assert scene.tick(hours_later=hours_later) == NOTHING
    scene.write(f"events/20261128T010000.0Z-{machine}-boot-torch.json", {})  # it restarts
    scene.tick(hours_later=2.5)
    assert scene.tick(hours_later=2.9)["action"] == "to-zero"


def test_a_time_in_which_the_guard_could_not_read_either_is_no_silence(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five hours of S3's trouble: its first call may come before the machine's next heartbeat."""
    scene.head("running")
    scene.tick()
    with monkeypatch.context() as patch:
        patch.setattr(records, "_get", _unavailable)
        for hours_later in range(1, 5):
            with pytest.raises(GuardError):
                scene.tick(hours_later=hours_later)
    assert scene.tick(hours_later=5) == NOTHING
    assert scene.tick(hours_later=5.9) == NOTHING
    assert scene.tick(hours_later=6.1)["action"] == "to-zero"


def _unavailable(*_: object, **__: object) -> None:
    raise ConnectTimeoutError(endpoint_url="https://s3")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"step": 3, "files": 1, "bytes": 1}', b'{"step": "dataset", "bytes": 9}',
     b'{"step": "a", "files": 0, "bytes": "9"}', b'{"step": "a", "files": 9, "bytes": -1}',
     b'{"step": "a", "files": 0, "bytes": Infinity}'],
)  # fmt: skip
def test_a_damaged_record_is_reported_and_keeps_nothing_alive(scene: Scene, data: bytes) -> None:
    for hours_later in (0, 0.9):
        scene.tick(hours_later=hours_later)
    (machine,) = scene.live()
    key = f"runs/run-1/{progress_key(machine)}"
    quick_client("s3").put_object(Bucket="runs", Key=key, Body=data)
    with pytest.raises(GuardError, match="progress"):
        scene.tick(hours_later=1.1)
    assert scene.capacity() == 0

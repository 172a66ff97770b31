"""The records of machines for the Guard, as their own programs name them."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError
from moto.sns.models import sns_backends

from stacks.guard.handler import GuardError
from stacks.guard.ledger import Note
from stacks.guard.records import MACHINE_FAILED, MOST_BYTES, machine_events, publish
from stacks.guard.settings import GuardSettings, quick_client
from tests.stacks.guard.scene import ACCOUNT, REGION, Scene
from userdata.events import leave_event

USERDATA = Path(__file__).parents[3] / "userdata"


def test_the_words_of_a_machine_are_found_by_the_name_that_it_gives_them(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MACHINE_ROOT", str(tmp_path))
    monkeypatch.setenv("INSTANCE_ID", "i-0abc")
    began = datetime.now(UTC).timestamp()
    said = (("boot-disk", "no"), ("boot-disk", "again"), ("boot-torch", "2.12"), ("boot", ""))
    for name, message in (*said, (MACHINE_FAILED, "first"), (MACHINE_FAILED, "last")):
        event = leave_event(name, "failed", message=message)
        scene.write(f"events/{event.name}", json.loads(event.read_text()))
    settings = GuardSettings.from_environment(scene.variables)
    found = machine_events(settings, began - 60)
    ((instance_id, when, message),) = found.failures
    assert (instance_id, message) == ("i-0abc", "last")
    assert when == pytest.approx(began, abs=60)
    # A step counts once, however often a machine repeats it.
    assert found.steps == {"i-0abc": 2}
    assert machine_events(settings, began + 3600).failures == []


@pytest.mark.parametrize("hours_off", [-40.0, -2.0, 2.0, 40.0])
def test_a_failure_counts_from_its_time_in_s3_whatever_the_machines_clock_says(
    scene: Scene, hours_off: float
) -> None:
    scene.tick()
    scene.head("running")
    scene.failed(*scene.live(), "no disk", hours_ago=-hours_off)
    assert scene.tick()["action"] == "none"
    assert scene.tick(hours_later=0.1)["reason"].endswith("is still running: no disk")


@pytest.mark.parametrize("damage", [None, b"", b"{", b'{"attempts": []}'])
def test_a_damaged_ledger_forgets_nothing(scene: Scene, damage: bytes | None) -> None:
    quick_client("s3").put_bucket_versioning(
        Bucket="runs", VersioningConfiguration={"Status": "Enabled"}
    )
    scene.tick(hours_later=5)
    own = {"Bucket": "runs", "Key": "runs/run-1/guard.json"}
    if damage is None:
        quick_client("s3").delete_object(**own)
    else:
        quick_client("s3").put_object(**own, Body=damage)
    scene.tick(hours_later=5.1)
    (attempt,) = scene.read("guard.json")["attempts"].values()
    assert attempt["usd"] > 5 * 0.4


def test_a_write_whose_answer_times_out_was_done(scene: Scene) -> None:
    def time_out(**_: object) -> None:
        events.unregister("after-call.s3.PutObject", time_out)
        raise ReadTimeoutError(endpoint_url="https://runs.s3.amazonaws.com")

    events = quick_client("s3").meta.events
    events.register("after-call.s3.PutObject", time_out)
    assert scene.tick()["action"] == "none"
    assert scene.read("guard.json")["attempts"]


def test_a_lost_ledger_stops_the_run(scene: Scene) -> None:
    quick_client("s3").put_object(Bucket="runs", Key="runs/run-1/guard.json", Body=b"{")
    with pytest.raises(GuardError, match="no version of"):
        scene.tick()
    assert scene.capacity() == 0
    (mail,) = scene.mails()
    assert "what has been spent is unknown" in mail
    assert "Restore an older version" in mail


def test_every_script_gives_it_that_name() -> None:
    scripts = {path.name: path.read_text() for path in USERDATA.iterdir() if path.is_file()}
    naming = {name for name, text in scripts.items() if MACHINE_FAILED in text}
    assert naming == {"end_machine.py", "failure_place.py", "service_failed.sh"}


def test_a_mail_has_a_subject_that_sns_takes_whatever_a_machine_has_sent(scene: Scene) -> None:
    settings = GuardSettings.from_environment(scene.variables)
    headline = "Terminated i-0: it failed: 50%|##   |\r\x1b[31mKilled\x1b[0m\tat dépôt\n" + "x" * 99
    note = Note(
        key="k", time=0.0, name="terminated", headline=headline, lines=[], fields={}, ways=["mail"]
    )
    publish(settings, note)
    topic = sns_backends[ACCOUNT][REGION].topics[scene.topic_arn]
    ((_, message, subject, *_),) = topic.sent_notifications
    # Publish, Subject: "no line breaks or control characters, and less than 100 characters long".
    assert subject.isascii() and subject.isprintable() and len(subject) < 100
    assert subject.startswith("TrainingStack: Terminated i-0: it failed: 50%|##")
    assert "\x1b[31mKilled" in message


@pytest.mark.parametrize(
    "head",
    [
        {"state": []},
        {"state": {}},
        {"state": "running", "x": "x" * MOST_BYTES},
        {"state": None},
        [],
    ],
    ids=["list", "object", "large", "none", "no-object"],
)
def test_limits_hold_whatever_a_machine_writes(scene: Scene, head: Any) -> None:
    scene.head("running")
    scene.tick(HEARTBEAT_TIMEOUT_SECONDS=900_000)
    scene.write("head.json", head)
    with suppress(GuardError):
        scene.tick(hours_later=72.5, HEARTBEAT_TIMEOUT_SECONDS=900_000)
    assert scene.capacity() == 0
    assert "hours billed; max_hours is 72" in scene.mails()[-1]


def test_of_events_that_a_program_made_up_the_newest_are_read(scene: Scene) -> None:
    scene.head("running")
    scene.write("events/20261130T000000Z-i-1-head-not-marked.json", ["no event"])
    for number in range(60):
        scene.failed(f"i-{number:02}", "x" * 9000, name="head-not-marked")
    scene.tick()
    assert scene.mails() == []  # of none of these machines EC2 has said anything
    found = machine_events(GuardSettings.from_environment(scene.variables), 0.0).given_up
    assert len(found) == 50
    assert {message for *_, message in found} <= {"x" * 4000}


def test_what_was_cut_within_a_letter_is_mailed(scene: Scene) -> None:
    scene.tick()
    scene.head("failed", reason="no file \udcc3", nonce="a")
    scene.tick()
    assert "no file ?" in scene.mails()[-1]


@pytest.mark.parametrize(
    "progress",
    [
        {"step": "x" * 101, "files": 1, "bytes": 1},
        {"step": "boot", "files": 10**4299, "bytes": 1},
        {"step": "boot", "files": 1, "bytes": 2**63},
    ],
    ids=["step", "files", "bytes"],
)
def test_a_progress_that_no_machine_of_ours_makes_is_not_kept(
    scene: Scene, progress: dict[str, Any]
) -> None:
    scene.tick()
    (machine,) = scene.live()
    scene.write(f"progress/{machine}.json", progress)
    with pytest.raises(GuardError, match="the progress is"):
        scene.tick(hours_later=0.2)
    assert scene.read("guard.json")["attempts"][machine]["progress"] == {}

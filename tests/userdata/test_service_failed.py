"""A service that failed for good ends the run, this machine, or nothing."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.errors import Exit
from rehearsal.machines.metadata import MetadataServer, RehearsedInstance
from rehearsal.machines.process import SHIMS
from tests.userdata.rig import REPOSITORY, USERDATA, install

# Of EC2, S3 and systemd only what the scripts ask; each call is noted.
AWS = r"""#!/bin/bash
echo "$*" >>"$MACHINE_ROOT/calls"
case "$*" in
s3\ cp*head.json*)
    HEAD=$(cat "$MACHINE_ROOT/reopened" 2>/dev/null || echo "$HEAD")
    if [[ -e $MACHINE_ROOT/throttled ]] && grep -q "training fail" "$MACHINE_ROOT/calls"; then
        echo "(SlowDown)" >&2
        exit 1
    fi
    [[ $HEAD ]] || { echo "(404)" >&2; exit 1; }; echo "$HEAD" >"${@: -1}" ;;
s3\ mv*) cp "${@: -2:1}"/*.json "$MACHINE_ROOT/sent" ;;
s3\ cp*machine-failed*) cp "$MACHINE_ROOT"/others/* "${@: -1}" ;;
ssm*) cat "$MACHINE_ROOT/fleet" 2>/dev/null || echo sfr-1 ;;
ec2\ modify*|autoscaling*)
    mv "$MACHINE_ROOT"/{reopens,reopened} 2>/dev/null
    [[ ! -e $MACHINE_ROOT/refusal ]] || { cat "$MACHINE_ROOT/refusal" >&2; exit 1; } ;;
esac
"""
SYSTEMCTL = r"""#!/bin/bash
for property in ActiveState=failed Result=$RESULT ExecMainStatus=$STATUS InvocationID=c0ffee; do
    [[ $* == *=${property%%=*} || $* == *=${property%%=*}\ * ]] && echo "${property#*=}"
done
exit 0
"""
JOURNALCTL = r"""#!/bin/bash
[[ $* != *\ INVOCATION_ID=c0ffee\ * ]] || cat "$MACHINE_ROOT/journal" 2>/dev/null
"""
PYTHON = """#!/bin/bash
echo "$*" >>"$MACHINE_ROOT/calls"
"""
AT_STEP_7 = "stage head after step 7"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose trainer failed after step 7."""
    for name in ("etc/training", "run/training", "opt/training", "bin", "sent", "others"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "var/log/training").mkdir(parents=True)
    example = (USERDATA / "run.env.example").read_text()
    (tmp_path / "etc/training/run.env").write_text(example)
    programs = {"aws": AWS, "systemctl": SYSTEMCTL, "journalctl": JOURNALCTL, "python": PYTHON}
    for name, text in programs.items():
        install(tmp_path / "bin" / name, text)
    (tmp_path / "var/log/training/training.log").write_text("step 7\nthe last words\n")
    step = {"kind": "step", "stage": "head", "step": 7}
    (tmp_path / "var/log/training/metrics.jsonl").write_text(json.dumps(step) + "\n")
    fail_before(tmp_path, "stage head")
    return tmp_path


def fail_before(root: Path, place: str) -> None:
    """Another machine has failed there."""
    failed = {"name": "machine-failed", "instance_id": "i-1", "place": place}
    (root / "others/1.json").write_text(json.dumps(failed))


Fail = Callable[..., tuple[list[str], list[dict[str, str]]]]


@pytest.fixture
def fail(root: Path) -> Fail:
    """Return a function that runs the script; it returns the calls and the events sent."""

    def run(
        service: str = "training",
        *,
        result: str = "exit-code",
        status: int,
        head: str = "",
        market: str = "spot",
    ) -> tuple[list[str], list[dict[str, str]]]:
        with MetadataServer(instance=RehearsedInstance(id="i-2", market=market)) as metadata:
            service_fails(service, metadata.endpoint, result, status, head)
        calls = (root / "calls").read_text().splitlines()
        group = "autoscaling update-auto-scaling-group --auto-scaling-group-name S-r1"
        groups = [f"{group}{each} --min-size 0 --max-size 0" for each in ("", ".on-demand")]
        known = ("ec2 terminate", "ec2 modify-spot-fleet", "-m training fail", *groups)
        made = [next((name for name in known if call.startswith(name)), "") for call in calls]
        sent = sorted((root / "sent").iterdir())
        return list(filter(None, made)), [json.loads(path.read_text()) for path in sent]

    def service_fails(service: str, endpoint: str, result: str, status: int, head: str) -> None:
        subprocess.run(
            ["bash", "userdata/service_failed.sh", f"{service}.service"],
            cwd=REPOSITORY,
            env={
                "MACHINE_ROOT": str(root),
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint,
                "PATH": f"{root / 'bin'}:{SHIMS}:/usr/bin:/bin",
                "INSTANCE_ID": "i-2",
                "PYTHON": str(root / "bin/python"),
                "RESULT": result,
                "STATUS": str(status),
                "HEAD": head,
                "FLEET_RETRY_SECONDS": "0.1",
            },
            check=True,
        )

    return run


def test_crashes_end_the_machine_and_the_event_says_where(fail: Fail) -> None:
    made, (event,) = fail(result="start-limit-hit", status=1)
    assert made == ["ec2 terminate"]
    assert (event["name"], event["place"]) == ("machine-failed", AT_STEP_7)
    assert event["message"] == "training failed (start-limit-hit, exit status 1): the last words"


def test_the_event_says_that_the_machines_memory_ran_out(fail: Fail, root: Path) -> None:
    (root / "journal").write_text("A process of this unit has been killed by the OOM killer.\n")
    made, (event,) = fail(result="start-limit-hit", status=9)
    assert (made, event["place"]) == (["ec2 terminate"], AT_STEP_7)
    assert event["message"] == (
        "training failed (start-limit-hit, exit status 9; the kernel killed a process of it: "
        "out of memory): the last words"
    )


def test_a_place_where_another_machine_failed_too_ends_the_run(fail: Fail, root: Path) -> None:
    fail_before(root, AT_STEP_7)
    made, events = fail(result="start-limit-hit", status=1)
    assert made == ["-m training fail", "ec2 modify-spot-fleet"]
    given_up = next(event for event in events if event["name"] == "run-given-up")
    assert f"i-1 failed there too: {AT_STEP_7}; take it back with: " in given_up["message"]


def test_a_failed_gpu_ends_the_machine_wherever_others_failed(fail: Fail, root: Path) -> None:
    fail_before(root, AT_STEP_7)
    (root / "dev").mkdir()
    (root / "dev/kmsg").write_text("NVRM: Xid (PCI:0000:00:1e): 79, GPU has fallen off the bus.")
    made, (event,) = fail(result="signal", status=6)
    assert made == ["ec2 terminate"]
    assert event["message"].startswith("GPU PCI:0000:00:1e of this machine failed: Xid 79")
    assert "place" not in event


def test_what_a_trial_step_says_of_a_failed_gpu_is_not_the_users_mistake(
    fail: Fail, root: Path
) -> None:
    line = "error: a trial step of the recipe failed: CUDA error: uncorrectable ECC error"
    (root / "var/log/training/training.log").write_text(line)
    made, (event,) = fail(status=2)
    assert made == ["ec2 terminate"]
    assert event["message"].startswith("a GPU of this machine failed: ")


@pytest.mark.parametrize("status", [Exit.MACHINE, Exit.STORE, Exit.LEASE_LOST])
def test_a_failed_data_volume_store_or_lease_says_nothing_of_the_place(
    fail: Fail, root: Path, status: int
) -> None:
    fail_before(root, AT_STEP_7)
    made, (event,) = fail(result="start-limit-hit", status=status)
    assert made == ["ec2 terminate"]
    assert event["name"] == "machine-failed"
    assert "place" not in event


def test_a_last_line_without_end_keeps_no_machine(fail: Fail, root: Path) -> None:
    # A progress bar writes one; no program takes it as an argument.
    (root / "var/log/training/training.log").write_text("epoch 1\r" * 30_000 + "\0last words")
    made, (event,) = fail(result="start-limit-hit", status=1)
    assert made == ["ec2 terminate"]
    assert event["message"].endswith("last words")
    assert len(event["message"]) < 2000


@pytest.mark.parametrize("length", [999, 1000])
def test_a_last_line_that_is_cut_within_a_letter_is_text(
    fail: Fail, root: Path, length: int
) -> None:
    words = "é" * 600 + "x" * (length % 2)
    (root / "var/log/training/training.log").write_text(words, encoding="utf-8")
    _, (event,) = fail(result="start-limit-hit", status=1)
    assert event["message"].endswith("é" * 499 + "x" * (length % 2))
    event["message"].encode()


@pytest.mark.parametrize(
    ("service", "status", "ends"),
    [
        ("training", 1, ["ec2 terminate"]),
        ("training", 2, ["-m training fail", "ec2 modify-spot-fleet"]),
        ("training-boot", 1, ["ec2 terminate"]),
        ("training-boot", 78, ["-m training fail", "ec2 modify-spot-fleet"]),
    ],
)
def test_a_full_disk_keeps_neither_a_machine_nor_a_run(
    fail: Fail, root: Path, service: str, status: int, ends: list[str]
) -> None:
    (root / "var/lib").mkdir()
    (root / "var/lib/training").write_text("no event can be left here")
    (root / "var/log/training/boot.log").symlink_to("/dev/full")
    made, events = fail(service, status=status)
    assert (made, events) == (ends, [])


@pytest.mark.parametrize("is_throttled", [False, True])
@pytest.mark.parametrize(("service", "status"), [("training", 2), ("training-boot", 78)])
def test_what_no_machine_could_do_better_ends_the_run(
    fail: Fail, root: Path, service: str, status: int, is_throttled: bool
) -> None:
    if is_throttled:  # of the head, once it is marked
        (root / "throttled").touch()
    made, events = fail(service, status=status)
    assert made == ["-m training fail", "ec2 modify-spot-fleet"]
    assert [event["name"] for event in events] == ["run-given-up", "fleet-to-zero"]


@pytest.mark.parametrize(
    ("service", "result", "status"),
    [("training", "signal", 2), ("training-boot", "exit-code", 2), ("training-boot", "signal", 9)],
)
def test_signals_and_other_statuses_are_the_machines_fault(
    fail: Fail, service: str, result: str, status: int
) -> None:
    made, events = fail(service, result=result, status=status)
    assert made == ["ec2 terminate"]
    assert [event["name"] for event in events] == ["machine-failed"]


def test_where_the_trainer_has_failed_the_run_itself_nothing_is_the_machines_fault(
    fail: Fail,
) -> None:
    made, events = fail(status=1, head='{"state": "failed"}')
    assert made == ["ec2 modify-spot-fleet"]
    assert [event["name"] for event in events] == ["fleet-to-zero"]


@pytest.mark.parametrize("fleet", ["sfr-1", "S-r1"])
def test_a_machine_on_demand_ends_with_its_run(fail: Fail, root: Path, fleet: str) -> None:
    (root / "fleet").write_text(f"{fleet}\n")
    made, _ = fail(status=1, head='{"state": "finished"}', market="on-demand")
    is_ended_by_its_group = fleet == "S-r1"
    assert made[-1].startswith("autoscaling" if is_ended_by_its_group else "ec2 terminate")
    if not is_ended_by_its_group:
        # Without the second, the fleet keeps asking for what a deploy has set of it.
        both = "--target-capacity 0 --on-demand-target-capacity 0"
        assert both in (root / "calls").read_text()


def test_a_cancelled_fleet_is_at_zero_already(fail: Fail, root: Path) -> None:
    (root / "refusal").write_text("The spot fleet request 'sfr-1' is in state cancelled_running")
    made, events = fail(status=1, head='{"state": "finished"}')
    assert made == ["ec2 modify-spot-fleet"]
    assert [event["status"] for event in events] == ["info"]


def test_a_run_that_a_person_reopens_while_ec2_refuses_keeps_its_fleet(
    fail: Fail, root: Path
) -> None:
    (root / "refusal").write_text("RequestLimitExceeded")
    (root / "reopens").write_text('{"state": "released"}')
    made, events = fail(status=1, head='{"state": "failed"}')
    assert made == ["ec2 modify-spot-fleet", "ec2 terminate"]
    assert [event["message"] for event in events] == ["the run is failed", "the run was reopened"]


def test_a_machine_that_gave_up_a_run_does_not_do_so_again_once_it_is_reopened(
    fail: Fail, root: Path
) -> None:
    """systemd starts this again after a minute, while EC2 takes no fleet to zero."""
    (root / "run/training/given-up").touch()
    assert fail(status=2, head='{"state": "released"}')[0] == ["ec2 terminate"]
    (root / "calls").write_text("")
    assert fail(status=2, head='{"state": "failed"}')[0] == ["ec2 modify-spot-fleet"]


@pytest.mark.parametrize("refusal", ["", "AutoScalingGroup name not found - AutoScalingGroup S-r1"])
def test_of_a_fleet_of_groups_both_go_to_zero(fail: Fail, root: Path, refusal: str) -> None:
    (root / "fleet").write_text("S-r1\n")
    if refusal:
        (root / "refusal").write_text(refusal)
    made, events = fail(status=1, head='{"state": "finished"}')
    names = [each.split()[3] for each in made]
    assert names == (["S-r1"] if refusal else ["S-r1", "S-r1.on-demand"])
    assert [event["status"] for event in events] == ["info"]

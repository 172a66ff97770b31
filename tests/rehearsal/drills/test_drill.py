"""Drills are read from files; what they do not say right is refused in one sentence."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from embedded_aws.capacity import Course
from embedded_aws.faults import Fault
from rehearsal.demo.actions import Action, Seen
from rehearsal.drills.drill import FETCH, choose, known_drills, read_drills, trace_steps
from rehearsal.machines.quirks import Quirks, Volume

REPOSITORY = Path(__file__).parents[3]

WHOLE = """
about = "all that a drill can say"
needs = "nspawn"
timeout_seconds = 60
[parameters]
max_hours = 0.01
[guard]
GRACE = 5
[[capacity]]
zone = "us-east-1a"
steps = [[0, 1], [20, 0]]
has_notice = false
[[capacity]]
market = "on-demand"
trace = "trace.json"
hour_seconds = 60
usd_per_hour = 1.006
[[fault]]
action = "ec2:TerminateInstances"
status = 403
[[machine]]
which = [1]
fails_at = "dataset"
lacks = ["safetensors"]
programs.nvidia-smi = "exit 9"
environment.FETCH_ATTEMPTS = 1
[[machine.disks]]
content = "ext4"
[[machine]]
programs.pip = "exit 1"
memory_mib = 500
[[action]]
at = "head:30"
do = "capacity"
[[action.capacity]]
machines = 2
[[action]]
at = "after:0.5"
do = "faults"
[[action.fault]]
action = "s3:*"
delay_seconds = 2
[[action]]
at = "log:ready$"
do = "execute"
command = "reboot"
[[action]]
at = "head:31"
do = "notice"
seconds = 1.25
[[action]]
at = "ended"
do = "deploy"
parameters."train.keep" = 4
[expect]
ends = "failure event"
machines = 2
markets = ["spot", "on-demand"]
events = ["machine-failed: .*"]
"""
LEAST = 'about = "a"\n[expect]\nends = "equal result"\n'


def written(folder: Path, text: str) -> Path:
    trace = {"metadata": {"gap_seconds": 3600}, "data": [1, 0]}
    (folder / "trace.json").write_text(json.dumps(trace))
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_says_what_fails_when_and_how_it_ends(tmp_path: Path) -> None:
    (drill,) = read_drills(written(tmp_path, WHOLE))
    assert (drill.name, drill.needs) == ("mine", "nspawn")
    assert drill.faults == (Fault(action="ec2:TerminateInstances", status=403),)
    assert drill.parameters == {"max_hours": "0.01"}
    assert drill.capacity == (
        Course(zone="us-east-1a", steps=((0, 1), (20, 0)), has_notice=False),
        Course(market="on-demand", steps=((0, 1), (60, 0)), usd_per_hour=1.006),
    )
    first, second = drill.quirks(1), drill.quirks(2)
    assert set(first.programs) == {"nvidia-smi", "python3", "pip"}
    assert first.lacks == ("safetensors",)
    assert first.environment == {"FETCH_ATTEMPTS": "1"}
    assert (first.disks, first.memory_mib) == ((Volume(content="ext4"),), 500)
    assert second == Quirks(programs={"pip": "exit 1"}, memory_mib=500)
    assert drill.actions == (
        Action(at="head:30", do="capacity", capacity=(Course(steps=((0, 2),)),)),
        Action(at="after:0.5", do="faults", faults=(Fault(action="s3:*", delay_seconds=2),)),
        Action(at="log:ready$", do="execute", command="reboot"),
        Action(at="head:31", do="notice", seconds=1.25),
        Action(at="ended", do="deploy", parameters={"train.keep": "4"}),
    )
    assert drill.expect.markets == ("spot", "on-demand")


def test_one_file_may_be_a_drill_for_each_of_several_words(tmp_path: Path) -> None:
    text = 'for_each = ["fetch", "dataset"]\n' + LEAST + '[[machine]]\nfails_at = "{each}"\n'
    fetch, dataset = read_drills(written(tmp_path, text))
    assert [fetch.name, dataset.name] == ["mine fetch", "mine dataset"]
    assert "bundle.zip" in fetch.quirks(1).programs["aws"]
    assert "userdata.run_step dataset" in dataset.quirks(1).programs["python3"]


@pytest.mark.parametrize(
    ("at", "seen", "due"),
    [
        ("head:30", Seen(), False),
        ("head:30", Seen(line={"stage": "head", "stage_step": 29}), False),
        ("head:30", Seen(line={"stage": "head", "stage_step": 31}), True),
        ("features:2", Seen(line={"stage": "features", "done": 2}), True),
        ("head:30", Seen(line={"stage": "head", "stage_step": 31}, is_over=True), False),
        ("after:2", Seen(seconds=1.9), False),
        ("after:2", Seen(seconds=2), True),
        ("log:^.ok. \\w+:", Seen(log=["[retry] torch: again"]), False),
        ("log:^.ok. \\w+:", Seen(log=["[ok] torch: 2.14", "features: 1/16"]), True),
        ("ended", Seen(line={"stage": "head", "stage_step": 31}), False),
        ("ended", Seen(is_over=True), True),
    ],
)
def test_an_action_waits_for_its_moment(at: str, seen: Seen, due: bool) -> None:
    assert Action(at=at, do="faults").is_due(seen) is due


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('about = "a"\n', r"\[expect\].*'ends'"),
        (LEAST.replace("equal result", "well"), "ends is 'well'; use one of: equal result, fail"),
        ("surprise = 1\n" + LEAST, "a drill has no 'surprise'; it has name, about, expect"),
        (LEAST + "[[machine]]\nbreaks_at = 1\n", r"\[\[machine\]\] has no 'breaks_at'"),
        (LEAST + "[[capacity]]\nsizes = 1\n", "capacity has no 'sizes'"),
        (LEAST + '[[action]]\nat = "head"\ndo = "kill"\n', "at is 'head'; use STAGE:N, log:PA"),
        (LEAST + '[[action]]\nat = "after:soon"\ndo = "faults"\n', "at is 'after:soon'; use"),
        (LEAST + '[[action]]\nat = "log:"\ndo = "faults"\n', "at is 'log:'; use STAGE:N"),
        (LEAST + '[[action]]\nat = "log:("\ndo = "faults"\n', "unterminated subpattern"),
        (LEAST + '[[action]]\nat = "ended"\ndo = "kill"\n', "needs a running machine: not at"),
        (LEAST + '[[action]]\nat = "head:1"\ndo = "execute"\n', "'execute' needs command"),
        (LEAST + '[[action]]\nat = "head:1"\ndo = "kill"\nseconds = 1\n', "takes no seconds; th"),
        (LEAST + '[[fault]]\naction = "s3:Put"\n', "needs exactly one of status, delay_seconds"),
        (LEAST + '[[fault]]\nfails = "s3:Put"\n', "fault has no 'fails'; it has action, key"),
        ('needs = "root"\n' + LEAST, "needs is 'root'; use one of: process, nspawn"),
        (LEAST + "[[machine]]\ndisks = [{size = 1}]\n", "disks has no 'size'; it has device_name"),
        (LEAST + '[[action]]\nat = "head:1"\ndo = "stop"\n', "do is 'stop'; use one of: kill"),
        (LEAST + '[[action]]\nat = "head:1"\ndo = "capacity"\n', "'capacity' needs capacity"),
        (LEAST + '[[action]]\nat = "head:1"\ndo = "guard"\n', "needs guard_is_invoked = false"),
        (LEAST + 'events = ["("]\n', "unterminated subpattern"),
        (LEAST + 'events = "to-zero: "\n', "events of .*is 'to-zero: '; expected list"),
        (LEAST + "[[machine]]\nwhich = 1\n", "which of .*is 1; expected list"),
        (
            LEAST + '[[machine]]\nlacks = "torch"\n',
            "lacks of .*is 'torch'; expected list",
        ),
        (LEAST + "[[action]]\nat = 5\ndo = 'kill'\n", r"at of \[\[action\]\] is 5; expected str"),
        (LEAST + "[[fault]]\naction = 's3:*'\nstatus = '503'\n", "status of fault is '503'"),
        (LEAST + "machines = true\n", r"machines of \[expect\] is True; expected int"),
        ("about = ", "Invalid value"),
        ("for_each = 3\n" + LEAST, "for_each is 3; it must be a list of words"),
        (LEAST + "[[machine]]\nprograms = 3\n", r"programs of \[\[machine\]\] is 3; expected dict"),
        (
            LEAST + '[[capacity]]\ntrace = "a.json"\n',
            "capacity has a trace; it needs hour_seconds, too",
        ),
        (
            LEAST + '[[capacity]]\ntrace = "trace.json"\nhour_seconds = "soon"\n',
            "hour_seconds of capacity is 'soon'; expected int or float",
        ),
        (LEAST + '[[machine]]\nfails_at = "boot"\n', "is 'boot'; use one of: fetch, run-env, run"),
        ("timeout_seconds = -1\n" + LEAST, "timeout_seconds of a drill is -1; use a finite numb"),
        ("timeout_seconds = inf\n" + LEAST, "timeout_seconds of a drill is inf; use a finite nu"),
        (LEAST + "within_hours = nan\n", r"within_hours of \[expect\] is nan; use a finite"),
        (LEAST + "[[capacity]]\nsteps = [[nan, 1]]\n", "steps of capacity is nan; use a finite"),
        (LEAST + "[[machine]]\ndisks = [{late_seconds = -1}]\n", "late_seconds of disks is -1; u"),
        (
            LEAST + '[[action]]\nat = "head:1"\ndo = "notice"\nseconds = -1\n',
            "the notice's seconds are -1; use 0 or more",
        ),
        (
            LEAST + '[[action]]\nat = "head:1"\ndo = "clock"\nseconds = nan\n',
            r"seconds of \[\[action\]\] is nan; use a finite number",
        ),
    ],
)
def test_fails_a_file_that_says_it_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=said) as refused:
        read_drills(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_every_drill_of_the_folder_can_be_read_and_chosen() -> None:
    names = [each.name for each in known_drills()]
    assert len(names) == len(set(names)) >= 10
    assert [each.name for each in choose(["notice"])] == ["notice"]
    assert {each.name for each in choose(["boot-always"])} < set(names)
    assert choose([]) == known_drills()


def test_a_drill_says_where_a_kind_of_fleet_differs(tmp_path: Path) -> None:
    path = written(tmp_path, LEAST + '[asg]\nabout = "of groups"\n[spot]\ntimeout_seconds = 5\n')
    plain, spot, groups = (read_drills(path, kind)[0] for kind in ("", "spot", "asg"))
    assert (spot, groups) == (replace(plain, timeout_seconds=5), replace(plain, about="of groups"))
    assert [each.name for each in known_drills("asg")] == [each.name for each in known_drills()]
    (denied,) = choose(["self-stop-denied"], kind="asg")
    assert [fault.action for fault in denied.faults] == ["autoscaling:UpdateAutoScalingGroup"]


def test_drills_fail_every_step_that_a_boot_needs_once_and_always() -> None:
    script = (REPOSITORY / "userdata/bootstrap.sh").read_text()
    step = r"^(?:step|python3 -m userdata\.run_step) (\S+) (?!.*\|\|$)"
    steps = [FETCH, *re.findall(step, script, re.MULTILINE)]
    always, (once,) = choose(["boot-always"]), choose(["boot-once"])
    assert [each.name for each in always] == [f"boot-always {step}" for step in steps]
    numbers = range(1, len(steps) + 1)
    assert [once.quirks(number) for number in numbers] == [each.quirks(1) for each in always]
    assert once.expect.machines == len(steps) + 1


def test_fails_an_unknown_drill_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown drill 'nothing'"):
        choose(["nothing"])
    with pytest.raises(ValueError, match="no drill found at"):
        choose([str(tmp_path / "no.toml")])


def test_what_needs_another_kind_of_machine_is_left_out_or_refused_by_name() -> None:
    everything, here = choose([]), choose([], "process")
    assert {each.needs for each in here} == {""}
    assert [each for each in everything if not each.needs] == here
    assert choose([], "nspawn") == everything
    with pytest.raises(ValueError, match="the drill reboot needs machines of kind nspawn: add --m"):
        choose(["notice", "reboot"], "process")


def test_a_program_of_a_quirk_hides_the_real_one_and_may_call_it(tmp_path: Path) -> None:
    """The step that fails is the named one; every other reaches the real program."""
    text = LEAST + '[[machine]]\nfails_at = "dataset"\n'
    (drill,) = read_drills(written(tmp_path, text))
    real = tmp_path / "python3"
    real.write_text('#!/bin/sh\necho "real: $*"\n')
    real.chmod(0o755)
    script = 'real="$1"; shift\n' + drill.quirks(1).programs["python3"]
    calls = {
        "-m userdata.run_step dataset bash x.sh": "real: -m userdata.run_step dataset sh -c",
        "-m userdata.run_step training bash x.sh": "real: -m userdata.run_step training bash x.sh",
    }
    for call, said in calls.items():
        command = ["sh", "-c", script, "sh", str(real), *call.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(said)


def test_a_trace_is_read_as_its_changes_at_the_rehearsals_speed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    document = {"metadata": {"gap_seconds": 1800}, "data": [1, 1, 0, 0, 0, 2]}
    path.write_text(json.dumps(document))
    assert trace_steps(path, hour_seconds=60) == ((0, 1), (60, 0), (150, 2))


@pytest.mark.parametrize("text", ["[1, 0]", "{}", '{"metadata": {"gap_seconds": 0}, "data": [1]}'])
def test_fails_a_file_that_is_no_trace(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace"):
        trace_steps(path, hour_seconds=60)

"""A program on several hosts: each is told who it is, all begin alike, and all end together."""

import json
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest

from contract.program import Program
from tests.training.durable.program.programs import ProgramRun, tell
from tests.training.runs import free_port, wait_for
from training.durable.attempt.ranks import Hosts
from training.durable.program.container import Container, ContainerHost


def test_a_program_is_told_its_hosts_as_sagemaker_tells_them(tmp_path: Path) -> None:
    hosts = Hosts(names=("algo-1", "algo-2"), own="algo-2")
    host = ContainerHost(num_gpus=1, num_cpus=4, instance_type="ml.g5.xlarge", hosts=hosts)
    program, container = Program(command="python train.py"), Container(root=tmp_path)
    found = container.variables(program, host, "run-1", ())
    told = {
        "SM_HOSTS": '["algo-1","algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "CURRENT_HOST": "algo-2",
        "SM_HOST_COUNT": "2",
        "SM_CURRENT_HOST_RANK": "1",
        "SM_MASTER_ADDR": "algo-1",
        "SM_MASTER_PORT": "7777",
    }
    assert {name: found[name] for name in told} == told
    environment = json.loads(found["SM_TRAINING_ENV"])
    assert (environment["is_master"], environment["master_hostname"]) == (False, "algo-1")
    container.prepare(program, host, None)
    resources = json.loads((container.config / "resourceconfig.json").read_text())
    assert (resources["current_host"], resources["hosts"]) == ("algo-2", ["algo-1", "algo-2"])
    assert resources["instance_groups"][0]["hosts"] == ["algo-1", "algo-2"]


# Says what each host begins with, and goes on until it is told; one of them keeps what is done.
_LONG = """
    import os, time
    from pathlib import Path
    from training.program import commit
    told, state = Path("{folder}"), Path(os.environ["SM_CHECKPOINT_DIR"], "count")
    count = int(state.read_text()) if state.exists() else 0
    (told / f"{{os.environ['SM_CURRENT_HOST']}} began after {{count}}").touch()
    while not (told / "stop").exists():
        count += 1
        if os.environ["SM_CURRENT_HOST_RANK"] == "0":
            state.write_text(str(count))
            commit()
        time.sleep(0.05)
"""


def _spawned(run: ProgramRun, *of_second: str) -> "list[Popen[str]]":
    port = free_port()
    return [_spawned_at(run, "127.0.0.1", port), _spawned_at(run, "b", port, *of_second)]


def _spawned_at(run: ProgramRun, name: str, port: int, *more: str) -> "Popen[str]":
    hosts = f"--hosts={name}@127.0.0.1:{port},b"
    # A program that does not listen, and needs no other one, has all of a notice's time.
    budget = "--notice-budget-seconds=12"
    return run.spawn(hosts, f"--ml-root={run.folder / name}", budget, *more)


def test_hosts_begin_with_one_snapshot_and_a_notice_to_one_ends_both(run: ProgramRun) -> None:
    run.write(_LONG.format(folder=run.folder))
    first, second = _spawned(run)
    run.wait_for_snapshots(2)
    tell(second, signal.SIGTERM)
    assert "host b has ended, so the program ends here, too" in first.communicate(timeout=60)[0]
    assert (first.returncode, second.returncode) == (75, 75)
    assert run.head.state == "released"
    kept = Path(run.folder / "127.0.0.1" / "checkpoints" / "count").read_text()
    again = _spawned(run)
    began = [run.folder / f"{name} began after {kept}" for name in ("127.0.0.1", "b")]
    wait_for(lambda: all(path.exists() for path in began))
    (run.folder / "stop").touch()
    said = [process.communicate(timeout=60)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], said
    assert run.head.state == "finished"


# As an all-reduce of a flag has it: a signal to one host ends the program on all of them, with 0,
# and last on that one.
_AGREES = """
    import os, signal, time
    from pathlib import Path
    from training.program import commit
    stopping, rank = Path("{folder}", "stopping"), os.environ["SM_CURRENT_HOST_RANK"]
    signal.signal(signal.SIGTERM, lambda *_: stopping.touch())
    state, count = Path(os.environ["SM_CHECKPOINT_DIR"], "count"), 0
    while not stopping.exists():
        count += 1
        if rank == "0":
            state.write_text(str(count))
            commit()
        time.sleep(0.05)
    time.sleep(2.0 if rank == "{told}" else 0.3)
"""


@pytest.mark.parametrize("told", [0, 1])
def test_a_program_whose_hosts_agree_to_stop_at_a_notice_has_not_finished(
    run: ProgramRun, told: int
) -> None:
    run.write(_AGREES.format(folder=run.folder, told=told))
    both = _spawned(run)
    run.wait_for_snapshots(2)
    both[told].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [75, 75], said
    assert run.head.state == "released"


# As a collective has it: the first host's program cannot go on without the other's. None listens.
_MUTE = """
    import os, time
    from pathlib import Path
    from training.program import commit
    alive, state = Path("{folder}", "alive"), Path(os.environ["SM_CHECKPOINT_DIR"], "count")
    count = 0
    while True:
        if os.environ["SM_CURRENT_HOST_RANK"] == "1":
            alive.touch()
        elif alive.exists() and time.time() - alive.stat().st_mtime > 2.0:
            raise SystemExit("the other host's program has ended")
        else:
            count += 1
            state.write_text(str(count))
            commit()
        time.sleep(0.05)
"""


def test_a_notice_to_the_first_host_leaves_the_others_programs_to_train_if_they_do_not_listen(
    run: ProgramRun,
) -> None:
    run.write(_MUTE.format(folder=run.folder))
    both = _spawned(run)
    run.wait_for_snapshots(2)
    both[0].send_signal(signal.SIGUSR1)
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [75, 75], said
    assert "program has ended" not in "".join(said)
    assert run.head.state == "released"


def test_hosts_of_a_program_begin_with_one_snapshot_of_a_run_that_still_commits(
    run: ProgramRun,
) -> None:
    run.write(_LONG.format(folder=run.folder))
    old = run.spawn()
    run.wait_for_snapshots(1)
    more, port = f"--init-from={run.uri}", free_port()
    new = ProgramRun(folder=run.folder, uri=f"{run.uri}-more", options=run.options)
    second = _spawned_at(new, "b", port, more)
    wait_for(lambda: (run.folder / "b" / "code" / "train.py").exists())
    time.sleep(0.5)  # until it has looked for the newest
    run.wait_for_snapshots(run.head.checkpoints[-1].step + 3)
    first = _spawned_at(new, "127.0.0.1", port, more)
    wait_for(lambda: len([*run.folder.glob("* began after *")]) == 3)
    (run.folder / "stop").touch()
    said = [process.communicate(timeout=60)[0] for process in (old, first, second)]
    assert [process.returncode for process in (old, first, second)] == [0, 0, 0], said
    began = [path.name.partition(" began after ") for path in run.folder.glob("* began after *")]
    counts = {host: count for host, _, count in began}
    assert counts["127.0.0.1"] == counts["b"] != "0"


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--hyperparameter=rate=2", "hyperparameters {'rate': '2'}, and 127.0.0.1 {}"),
        ("--env=RATE=2", "environment {'RATE': '2'}, and 127.0.0.1 {}"),
        ("--program=python train.py now", "command 'python train.py now', and 127.0.0.1 "),
    ],
)
def test_fails_for_hosts_whose_programs_differ(run: ProgramRun, option: str, what: str) -> None:
    both = _spawned(run, option)
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [2, 2], said
    assert all(f"host b has the {what}" in each for each in said)

"""Room on one machine: the incident of four runs is refused, the same four as they are are not."""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from contract.errors import UserError
from contract.keys import MANIFEST
from contract.sweep import Sweep
from tests.training.forked import in_fork
from tests.training.runs import WORKLOAD, Run, wait_for
from tests.training.tiny import Tiny
from training.cli import sweep
from training.cli.main import main
from training.durable.errors import MachineError
from training.engine.job import WorkloadProxy
from training.preflight import preflight
from training.preflight.admission import (
    MachineCapacity,
    Reservations,
    ResourceRequest,
    _Reservation,
    _started,
    refuse_oversubscription,
    too_many_threads,
)
from training.preflight.preflight import resource_request
from training.registry import load_workload, resolve_config

T = TypeVar("T")

# A g5.2xlarge: 8 vCPUs, 32 GiB of which 30 are free after boot, one A10G.
G5_2XLARGE = MachineCapacity(free_host_mib=30 * 1024, vcpus=8, gpu_mib=(22_888,))
CLIP_BYTES = 32 * 64 * 64 * 3


class Reading(WorkloadProxy):
    """The workload of the incident: every clip into a list as float32, then stacked."""

    def data_bytes_in_memory(self, c: object, dataset_bytes: int) -> int:
        return 4 * dataset_bytes * 2


class Huge(Tiny):
    """Reads a thousand terabytes."""

    def data_bytes_in_memory(self, c: object, dataset_bytes: int) -> int:
        return 2**60


HUGE = Huge()


def need(folder: Path, *, reads: bool, gpu_mib: int | None = 5_000) -> ResourceRequest:
    """Of the full recipe over 10,000 clips of 32 frames."""
    folder.mkdir(exist_ok=True)
    files = [{"name": "clips.u8", "bytes": 10_000 * CLIP_BYTES, "sha256": "ab"}]
    manifest = {"format": 1, "workload": "trajectory", "files": files, "meta": {}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    workload = load_workload("trajectory")
    config = resolve_config(workload, "full", {"num_threads": "2"})
    return resource_request(
        "r", Reading(workload) if reads else workload, config, str(folder), gpu_mib
    )


def test_fails_for_four_runs_that_each_read_the_data(tmp_path: Path) -> None:
    each = need(tmp_path, reads=True)
    # 3.93 GB of bytes, four times as much as float32, twice that while it is stacked.
    assert each.data_mib == 30_000
    with pytest.raises(UserError) as refused:
        refuse_oversubscription([each] * 4, [], G5_2XLARGE)
    said = str(refused.value)
    assert "4 run(s) need 124096 MiB of memory (1024 for the process" in said
    assert "30000 for its own copy of the data = 31024 MiB each); 30720 MiB are free" in said
    assert ": 0 fit; run fewer at once, or let the workload map its data" in said


def test_four_runs_that_share_mapped_data_are_accepted(tmp_path: Path) -> None:
    four = [need(tmp_path, reads=False)] * 4
    refuse_oversubscription(four, [], G5_2XLARGE)
    assert too_many_threads(four, [], G5_2XLARGE) is None
    assert "share 8 vCPUs" in str(too_many_threads([*four, four[0]], [], G5_2XLARGE))


def test_fails_for_more_processes_than_the_machine_holds(tmp_path: Path) -> None:
    many = replace(need(tmp_path, reads=False), num_processes=99)
    with pytest.raises(UserError, match=r"99 processes, each 1024 for the process .* in total"):
        refuse_oversubscription([many], [], replace(G5_2XLARGE, gpu_mib=()))
    two = replace(many, num_processes=2)
    own = replace(two, loader_workers=0, data_mib=100)
    assert own.host_mib == 2 * (1024 + 100), "each process has a copy of the data"
    with pytest.raises(UserError, match=r"--num-processes is 2, but this machine has 1 GPU"):
        refuse_oversubscription([two], [], G5_2XLARGE)
    refuse_oversubscription([two], [], replace(G5_2XLARGE, gpu_mib=()))


def test_memory_that_is_taken_for_the_moment_is_the_machines_fault() -> None:
    mine = ResourceRequest(run="a", data_mib=20_000, loader_workers=0, threads=1, gpu_mib=20_000)
    busy = replace(G5_2XLARGE, free_host_mib=8 * 1024, host_mib=31 * 1024)
    with pytest.raises(MachineError, match="8192 MiB are free"):
        refuse_oversubscription([mine], [], busy)
    with pytest.raises(UserError, match="8192 MiB are free"):
        refuse_oversubscription([replace(mine, data_mib=25_000)], [], busy)
    idle = replace(busy, free_host_mib=30 * 1024)
    small = replace(mine, data_mib=0)
    with pytest.raises(MachineError, match="need 20000 MiB of GPU memory, 1 other"):
        # What others use is read only where the memory may not suffice.
        other = _Reservation(request=small, used=pytest.fail)
        refuse_oversubscription([small], [other], idle)
    with pytest.raises(UserError, match="need 40000 MiB of GPU memory, 1 other"):
        refuse_oversubscription([small] * 2, [_Reservation(request=small)], idle)


def test_what_others_have_reserved_and_not_yet_taken_counts() -> None:
    mine = ResourceRequest(run="a", data_mib=0, loader_workers=0, threads=1)
    large = ResourceRequest(run="b", data_mib=23 * 1024, loader_workers=0, threads=1)
    machine = MachineCapacity(free_host_mib=30 * 1024, vcpus=8)
    with pytest.raises(UserError, match="24576 MiB are reserved by 1 other"):
        refuse_oversubscription([mine], [_Reservation(request=large)], machine)
    # What it has taken is no longer among what is free.
    refuse_oversubscription([mine], [_Reservation(request=large, used=lambda: 20 * 2**30)], machine)


def test_fails_for_a_gpu_that_is_taken(tmp_path: Path) -> None:
    all_of_it = need(tmp_path, reads=False, gpu_mib=None)
    with pytest.raises(MachineError, match=r"22888 MiB of GPU memory, 1 other run\(s\) have"):
        refuse_oversubscription([all_of_it], [_Reservation(request=all_of_it)], G5_2XLARGE)
    with pytest.raises(UserError, match="need 25000 MiB of GPU memory"):
        refuse_oversubscription([need(tmp_path, reads=False)] * 5, [], G5_2XLARGE)


def hold(folder: Path, seconds: float) -> None:
    mine = ResourceRequest(run="other", data_mib=10, loader_workers=0, threads=1)
    with Reservations(folder).reserved(mine, MachineCapacity(free_host_mib=None, vcpus=2)):
        time.sleep(seconds)


def test_reservations_of_dead_processes_are_ignored(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path, 60))
    process.start()
    wait_for(lambda: bool(list(tmp_path.glob("*.json"))))
    (held,) = Reservations(tmp_path).others()
    assert held.request.run == "other"
    process.kill()
    process.join()
    assert len(list(tmp_path.glob("*.json"))) == 1, "SIGKILL leaves the file"
    assert list(Reservations(tmp_path).others()) == []
    assert list(tmp_path.glob("*.json")) == []


def test_the_memory_of_a_run_is_that_of_all_its_processes_once(tmp_path: Path) -> None:
    """60 MiB that the run and two loaders share, and 40 MiB of each loader's own."""
    code = (
        "import os, time, sys\n"
        "from pathlib import Path\n"
        "from training.durable.save.tensors.memory import used_bytes\n"
        "from training.preflight.admission import *\n"
        "print(used_bytes(os.getpid()) >> 20, flush=True)\n"
        "shared = b'x' * (60 << 20)\n"
        "for number in range(2):\n"
        "    if os.fork() == 0:\n"
        "        own = b'y' * (40 << 20)\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(600)\n"
        "need = ResourceRequest(run='a', data_mib=10, loader_workers=2, threads=1)\n"
        "machine = MachineCapacity(free_host_mib=None, vcpus=9)\n"
        "with Reservations(Path(sys.argv[1])).reserved(need, machine):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        began_with = int(process.stdout.readline())
        assert [process.stdout.readline() for _ in range(3)] == [b"ready\n"] * 3
        (held,) = Reservations(tmp_path).others()
        used_mib = held.used() >> 20
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert 135 <= used_mib - began_with < 195


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder in one like /tmp, below which every user may write."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o1777)
    yield root / "reservations"
    shutil.rmtree(root)


def as_user(user: int, act: Callable[[], T]) -> T:
    """What `act` returns in a process of another user, with a umask that shuts others out."""

    def switched() -> T:
        os.umask(0o077)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        return act()

    return in_fork(switched)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as other users")
def test_users_of_one_machine_see_each_other_s_reservations(shared_folder: Path) -> None:
    mine = ResourceRequest(run="mine", data_mib=10, loader_workers=0, threads=1)
    machine = MachineCapacity(free_host_mib=8_000, vcpus=2)
    large = replace(mine, run="large", data_mib=7_000)
    reservations = Reservations(shared_folder)

    def reserve(request: ResourceRequest) -> Callable[[], None]:
        def act() -> None:
            with reservations.reserved(request, machine):
                pass

        return act

    def die() -> None:
        with reservations.reserved(mine, machine):
            os._exit(0)

    as_user(1001, reserve(mine))
    with reservations.reserved(mine, machine):
        as_user(1002, reserve(mine))
        with pytest.raises(UserError, match=r"reserved by 1 other run\(s\)"):
            as_user(1001, reserve(large))
    with pytest.raises(EOFError):
        as_user(1001, die)
    assert len(list(shared_folder.glob("*.json"))) == 1, "left by a run that has died"
    as_user(1002, reserve(mine))
    assert len(list(shared_folder.glob("*.json"))) == 1, "another user's file cannot be deleted"
    as_user(1001, reserve(mine))
    assert list(shared_folder.glob("*.json")) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as other users")
def test_a_run_goes_on_where_nothing_can_be_reserved(shared_folder: Path) -> None:
    shared_folder.mkdir(mode=0o755)
    assert as_user(1001, lambda: hold(shared_folder, 0)) is None
    shared_folder.rmdir()
    victim = shared_folder.with_name("victim")
    victim.mkdir(mode=0o700)
    shared_folder.symlink_to(victim)
    hold(shared_folder, 0)
    assert victim.stat().st_mode & 0o777 == 0o700


def test_every_user_may_write_where_reservations_are(tmp_path: Path) -> None:
    hold(tmp_path / "reservations", 0)
    assert (tmp_path / "reservations").stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("need", [{"run": 1}, {"data_mib": "x"}, {"data_mib": -1}, {"more": 1}])
def test_a_reservation_that_nobody_made_holds_nothing(tmp_path: Path, need: Any) -> None:
    good = asdict(ResourceRequest(run="a", data_mib=1, loader_workers=0, threads=1))
    record = {"pid": os.getppid(), "began": _started(os.getppid()), "need": good}
    (tmp_path / "1-x.json").write_text(json.dumps(record))
    (held,) = Reservations(tmp_path).others()
    assert held.request.data_mib == 1
    (tmp_path / "1-x.json").write_text(json.dumps({**record, "need": {**good, **need}}))
    assert list(Reservations(tmp_path).others()) == []


def test_a_torn_file_and_a_process_id_used_again_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "1-x.json").write_text('{"pid": 1, "be')
    record = {"pid": os.getppid(), "began": "1", "need": {}}
    (tmp_path / "2-y.json").write_text(json.dumps(record))
    assert list(Reservations(tmp_path).others()) == []


def test_fails_before_anything_is_written_where_there_is_no_room(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt("--workload=tests.training.preflight.test_admission:HUGE") == 2
    assert "for its own copy of the data" in capsys.readouterr().err
    assert not Path(run.uri).exists()


@pytest.mark.usefixtures("forked_sweep")
def test_a_sweep_ends_with_a_table(
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["sweep", f"--workload={WORKLOAD}", "--recipe=quick", f"--dataset-uri={dataset}"]
    command += [f"--runs-uri={tmp_path / 'runs'}", "--parallel=2"]
    command += ["--vary=learning_rate=0.01,0.1"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in rows] == ["learning_rate-0.01", "learning_rate-0.1"]
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert rows[0]["metrics"] != rows[1]["metrics"]
    logs = sorted(path.name for path in Path("sweep-logs", "runs").iterdir())
    assert logs == ["learning_rate-0.01.log", "learning_rate-0.1.log"]
    assert main(command) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3
    written = (tmp_path / "runs" / "sweep.json").read_bytes()
    assert main([*command[:-1], "--vary=learning_rate=0.2"]) == 2
    assert "has another sweep, which cannot be changed" in capsys.readouterr().err
    assert (tmp_path / "runs" / "sweep.json").read_bytes() == written
    assert table[0].split() == ["run", "state", "steps", "seconds", "accuracy"]
    assert " 24 " in table[1]


def test_runs_side_by_side_share_the_gpu(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_mib", lambda: [20_000])
    monkeypatch.setattr(MachineCapacity, "here", lambda gpus: replace(G5_2XLARGE, gpu_mib=gpus))
    monkeypatch.setattr(Reservations, "others", lambda _: iter(()))
    options = argparse.Namespace(
        workload=WORKLOAD, recipe="quick", override=[], memory_limit_mib=None, parallel=4
    )
    assert sweep._refuse_or_share(options, dataset) == 5000


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 1), 1), ((0, 75), 75), ((0, None), 75)]
)
def test_a_sweep_that_was_ended_before_its_last_run_began_is_interrupted(
    codes: tuple[int | None, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [sweep._SweepRun(name="a", overrides=[], uri="", code=each) for each in codes]
    here = SimpleNamespace(folder=tmp_path)
    monkeypatch.setattr(sweep, "StoredDataset", lambda _: SimpleNamespace(fetched=lambda _: here))
    for name, value in {"_asked": None, "_refuse_or_share": None, "_run_all": None,
                        "_kept": runs, "_row": {"metrics": {}}}.items():  # fmt: skip
        monkeypatch.setattr(sweep, name, lambda *_, value=value: value)
    options = argparse.Namespace(
        logs=tmp_path, write_only=False, runs_uri="", dataset_uri=str(tmp_path), json=True
    )
    assert sweep._sweep(options) == code


def test_a_sweep_is_drawn_and_written_for_others_to_train(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", f"--workload={WORKLOAD}", "--recipe=quick", f"--dataset-uri={dataset}"]
    command += [f"--runs-uri={tmp_path / 'runs'}", "--vary=learning_rate=0.01..0.1", "--random=3"]
    assert main([*command, "--seed=5", "--write-only"]) == 0
    assert capsys.readouterr().out == f"[ok] {tmp_path / 'runs'}/sweep.json has 3 runs\n"
    written = Sweep.from_bytes((tmp_path / "runs" / "sweep.json").read_bytes(), "sweep.json")
    assert written.drawn == "3 at random, seed 5" and len(written.runs) == 3
    assert not list((tmp_path / "runs").glob("*/*")), "nothing was trained"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--vary=learning_rate"], "write name=value,value"),
        (["--vary=learning_rates=1,2"], "no field 'learning_rates'"),
        (["--vary=epochs=1,x"], "epochs='x' is not a valid int"),
        (
            ["--vary=learning_rate=0.1,0.10"],
            "learning_rate-0.1 and learning_rate-0.10 are the same",
        ),
        (["--vary=epochs=4..64", "--random=3"], "use whole numbers, and no range"),
        (
            [f"--vary=learning_rate=0.{'0' * 240}1,0.1"],
            "has 261 bytes in its name, more than the 255",
        ),
        (["--vary=epochs=1,2", "--parallel=100000"], "100000 run(s) need"),
    ],
)
def test_a_sweep_fails_before_it_starts_anything(
    dataset: Path, tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", f"--workload={WORKLOAD}", "--recipe=quick", f"--dataset-uri={dataset}"]
    command += [f"--runs-uri={tmp_path / 'runs'}", f"--logs={tmp_path / 'logs'}"]
    assert main([*command, *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()

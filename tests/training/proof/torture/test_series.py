"""Which ends of an attempt are nobody's bug."""

from dataclasses import replace
from pathlib import Path

from training.proof.experiment import AttemptResult
from training.proof.injector import Kill
from training.proof.torture.series import _unexpected_exit


def ended(folder: Path, code: int, log: str) -> AttemptResult:
    (folder / "log").write_text(log)
    return AttemptResult(
        code=code,
        kill=None,
        hit_phase="",
        outlived_by=(),
        num_faults=0,
        trained_on=False,
        follow_up=(),
        folder=folder,
        seconds=1.0,
    )


def test_hosts_that_are_late_on_a_busy_machine_are_no_difference(tmp_path: Path) -> None:
    late = ended(tmp_path, 1, "error: host host-1 did not come within 8 s; see its log\n")
    assert _unexpected_exit(late, is_store_faulty=False) == []


def test_an_attempt_that_fails_unharmed_is_unexpected(tmp_path: Path) -> None:
    (said,) = _unexpected_exit(ended(tmp_path, 1, "error: no\n"), is_store_faulty=False)
    assert said == f"ended with 1: error: no ({tmp_path})"


def test_damage_that_one_machine_reads_ends_it_and_is_no_difference(tmp_path: Path) -> None:
    """The first to find no checkpoint whole leaves the run to others: nothing is started over."""
    said = "error: none of the 1 checkpoints of runs/a can be used on this machine\n"
    unharmed = ended(tmp_path, 4, said)
    assert _unexpected_exit(replace(unharmed, num_faults=4), is_store_faulty=False) == []
    assert _unexpected_exit(unharmed, is_store_faulty=False) != []


def test_a_zombie_whose_unfinished_save_is_swept_is_no_difference(tmp_path: Path) -> None:
    said = "error: [Errno 2] No such file or directory: 'model.safetensors'\n"
    swept = ended(tmp_path, 74, said)
    assert _unexpected_exit(replace(swept, kill=Kill(kind="zombie")), is_store_faulty=False) == []
    assert _unexpected_exit(replace(swept, kill=Kill(kind="term")), is_store_faulty=False) != []

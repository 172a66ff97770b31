"""Which failures are a GPU's: by the kernel's log, and by the trainer's last lines."""

from pathlib import Path

import pytest

from userdata.gpu_fault import KERNEL_LOG, TRAINING_LOG, find_fault, main


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MACHINE_ROOT", str(tmp_path))
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    file = root / path.removeprefix("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_logs_no_gpu_has_failed() -> None:
    assert find_fault() is None
    assert main() == 1


def test_hardware_xids_are_a_fault_and_those_of_programs_are_not(root: Path) -> None:
    illegal = "4,990,71,-;NVRM: Xid (PCI:0000:00:1e): 31, pid=9, name=python, MMU Fault\n"
    write(root, KERNEL_LOG, illegal)
    assert find_fault() is None
    lost = "4,991,72,-;NVRM: Xid (PCI:0000:00:1e): 79, GPU has fallen off the bus.\n"
    write(root, KERNEL_LOG, illegal + lost)
    wanted = "GPU PCI:0000:00:1e of this machine failed: Xid 79, fallen off the bus"
    assert find_fault() == wanted
    assert main() == 0


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("RuntimeError: No CUDA-capable device is detected", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("RuntimeError: CUDA error: device unavailable", True),
        ("Failed to initialize NVML: Driver/library version mismatch", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("ValueError: the file clip-7 is damaged", False),
    ],
)
def test_the_trainers_last_lines_tell_a_gpus_fault_from_a_programs(
    root: Path, line: str, is_fault: bool
) -> None:
    write(root, TRAINING_LOG, f"step 7\n{line}\nafter training: exit-code, exited 1\n")
    assert (find_fault() is not None) == is_fault


def test_only_the_end_of_a_long_log_counts(root: Path) -> None:
    write(root, TRAINING_LOG, "GPU is lost\n" + "step 8\n" * 20_000)
    assert find_fault() is None

"""Which failures are a GPU's: by the kernel's log, and by the trainer's last lines."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.userdata.rig import install
from userdata import gpu_fault
from userdata.gpu_fault import KERNEL_LOG, TRAINING_LOG, find_fault, main


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MACHINE_ROOT", str(tmp_path))
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    file = root / path.removeprefix("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def changed(before: str, after: str) -> str:
    return f"GPU recovery action changed from {before} to {after}"


def test_without_logs_no_gpu_has_failed() -> None:
    assert find_fault() is None
    assert main() == 1


@pytest.mark.parametrize(
    ("number", "text", "fault"),
    [
        (46, "pid=9, name=python, GPU stopped processing", "Xid 46, stopped processing"),
        (136, "Link 3 failed", "Xid 136, NVLink could not be trained"),
        (154, changed("0x0 (None)", "0x1 (GPU Reset Required)"), "Xid 154, GPU Reset Required"),
        (154, changed("0x0 (None)", "0x2 (Node Reboot Required)"), "Xid 154, Node Reboot Required"),
        (154, changed("0x0 (None)", "0x3 (Drain P2P)"), None),
        (154, changed("0x1 (GPU Reset Required)", "0x0 (None)"), None),
    ],
)
def test_what_only_a_reset_mends_is_a_fault(
    root: Path, number: int, text: str, fault: str | None
) -> None:
    write(root, KERNEL_LOG, f"4,990,71,-;NVRM: Xid (PCI:0000:00:1e): {number}, {text}\n")
    assert find_fault() == (fault and f"GPU PCI:0000:00:1e of this machine failed: {fault}")


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("00000000:00:1E.0, 0, 0", None),
        ("00000000:00:1E.0, [N/A], [N/A]", None),
        ("00000000:00:1D.0, 0, 0\n00000000:00:1E.0, 1, 0", "broken memory rows wait for its reset"),
        ("00000000:00:1E.0, No, Yes", "broken memory rows have no spare left"),
    ],
)
def test_memory_that_waits_for_a_reset_is_a_fault(
    root: Path, rows: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, "bin/nvidia-smi", f"#!/bin/sh\necho '{rows}'\n")
    (root / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(root / "bin"), prepend=":")
    assert find_fault() == (fault and f"GPU 00000000:00:1E.0 of this machine failed: {fault}")


@pytest.mark.parametrize(
    ("can_be_killed", "fault"),
    [
        (True, None),
        (
            False,
            "a GPU of this machine failed: nvidia-smi hangs in the kernel, which cannot end it",
        ),
    ],
    ids=["slow", "hangs"],
)
def test_an_nvidia_smi_that_not_even_the_kernel_can_end_is_a_fault(
    root: Path, can_be_killed: bool, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(root / "bin/nvidia-smi", "#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setenv("PATH", str(root / "bin"), prepend=":")
    monkeypatch.setattr(gpu_fault, "SMI_SECONDS", 0.2)
    monkeypatch.setattr(gpu_fault, "END_SECONDS", 0.2)
    started: list[subprocess.Popen[str]] = []

    class Process(subprocess.Popen[str]):
        """One that may survive its kill."""

        def kill(self) -> None:
            started.append(self)
            if can_be_killed:
                super().kill()

    monkeypatch.setattr(gpu_fault, "Popen", Process)
    before = time.monotonic()
    try:
        assert find_fault() == fault
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert time.monotonic() - before < 10


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
        ("cudaGetDeviceCount(). Error 100: no CUDA-capable device is detected", True),
        ("NCCL WARN Cuda failure 100 'no CUDA-capable device is detected'", True),
        ("Cuda failure 'CUDA-capable device(s) is/are busy or unavailable'", True),
        # TensorFlow and JAX, which a script keeps on the CPU.
        ("failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected", False),
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

"""Which machines may train: torch sees each GPU that the size has, and each computes."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture
def import_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The program with a torch that sees one GPU, which computes; its compiler is one file."""
    (tmp_path / "_dynamo.py").write_text("LOADED = True\n")
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    torch = SimpleNamespace(
        __path__=[str(tmp_path)],
        __spec__=None,
        __version__="2.12.1",
        cuda=SimpleNamespace(device_count=lambda: 1),
        ones=lambda size, device: SimpleNamespace(item=lambda: 1.0),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "userdata.import_torch", raising=False)
    return importlib.import_module("userdata.import_torch")


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A bus with a network card, an audio device of NVIDIA and one GPU."""
    for name, vendor, kind in [
        ("00:05.0", "0x1d0f", "0x020000"),
        ("00:1e.1", "0x10de", "0x040300"),
        ("00:1e.0", "0x10de", "0x030200"),
    ]:
        (tmp_path / "devices" / name).mkdir(parents=True)
        (tmp_path / "devices" / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "devices" / name / "class").write_text(f"{kind}\n")
    return tmp_path / "devices"


def test_a_machine_with_the_gpus_of_its_size_is_fine(
    import_torch: ModuleType, devices: Path
) -> None:
    assert import_torch.find_fault(devices, 1) is None
    # Without a bus there is none to miss.
    assert import_torch.find_fault(devices / "none", 1) is None


def test_fails_when_a_gpu_is_off_the_bus(import_torch: ModuleType, devices: Path) -> None:
    fault = import_torch.find_fault(devices, 2)
    assert fault == "1 NVIDIA GPUs are on the PCI bus, but the size has 2"


def test_fails_when_torch_does_not_see_a_gpu(import_torch: ModuleType, devices: Path) -> None:
    import_torch.torch.cuda.device_count = lambda: 0
    assert "torch 2.12.1 sees 0 of 1 NVIDIA GPUs" in import_torch.find_fault(devices, 1)


def test_fails_when_a_gpu_does_not_compute(import_torch: ModuleType, devices: Path) -> None:
    def broken(size: int, device: str) -> None:
        raise RuntimeError(
            "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors ..."
        )

    import_torch.torch.ones = broken
    fault = import_torch.find_fault(devices, 1)
    assert fault == ("GPU 0 of 1 does not compute: CUDA error: uncorrectable ECC error encountered")


def test_what_was_read_is_recorded_unless_an_earlier_machine_has_done_it(
    import_torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MACHINE_ROOT", str(tmp_path))
    monkeypatch.setenv("NUM_GPUS", "1")
    import_torch.torch.cuda.device_count = lambda: 0
    run = tmp_path / "run/training"
    run.mkdir(parents=True)
    (run / "reads.json").write_text("[]")
    assert import_torch.main() == 0
    assert not (run / "reads-new.json").exists()
    (run / "reads.json").unlink()
    assert import_torch.main() == 0
    # With what the first optimizer imports, which the first step would wait for.
    assert "_dynamo" in (run / "reads-new.json").read_text()

"""The process that forks the attempts leaves the GPU to them."""

from pathlib import Path

import pytest

from training.cli.main import main


def test_a_workload_may_ask_for_gpus_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import torch\n\nassert torch.cuda.is_available()\nASKS = object()\n"
    (tmp_path / "asks_for_gpus.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    assert main(["check", "asks_for_gpus:ASKS"]) == 2
    assert "is an instance of object" in capsys.readouterr().err, "found without CUDA"

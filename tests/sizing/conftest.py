"""What this machine once asked AWS is none of these tests' business."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sizing.catalogue.refresh.CACHE_FOLDER", tmp_path / "no-cache")

"""The files of an evaluation, which only people look at."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.durable.store.folder import FolderStore
from training.durable.store.protocol import StoreError
from training.engine.evaluation import _keep_files


def test_files_that_the_store_refuses_end_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All steps since the last commit were lost for them, and the evaluation."""

    def refuse(*_: object) -> None:
        raise StoreError("503 SlowDown")

    monkeypatch.setattr(FolderStore, "put_file", refuse)
    (tmp_path / "table.csv").write_text("1,2")
    context: Any = SimpleNamespace(store=FolderStore(tmp_path / "run"))
    with caplog.at_level(logging.WARNING):
        _keep_files(context, "head", tmp_path)
    assert "the evaluation's files are not kept: 503 SlowDown" in caplog.text

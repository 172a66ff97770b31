"""torch.compile in a run: what older bundles kept of it in the store is left alone."""

import pytest
import torch

from tests.training.runs import Run


def test_the_compiled_code_that_an_older_bundle_kept_is_left_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"artifacts/{'0' * 32}/compiled.bin"
    run.store.put(key, b"code")
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    run.options = ["--override=compile_mode=default", "--override=epochs=1"]
    assert run.attempt() == 0
    kept = {name for name in run.store.sizes("") if name.endswith("compiled.bin")}
    assert kept == {key}

"""What torch.compile made is kept for replacements, and changes no bit of a result."""

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

from tests.training import tiny
from tests.training.hooks import HUNG_SECONDS, notice
from tests.training.runs import Run
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store
from training.engine.compilation import CompileCache

NUMERICS = {"torch": "2.14.1", "device": "cpu", "code": "a"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def key(store: Store, stage: str = "first", **changes: str) -> str:
    return CompileCache(store, stage, {**NUMERICS, **changes})._key


def test_another_torch_code_or_stage_has_another_key(store: Store) -> None:
    keys = {key(store), key(store, torch="2.12.0"), key(store, code="b"), key(store, "second")}
    assert len(keys) == 4
    assert key(store) == key(store)


@pytest.mark.parametrize(
    "content", [b"", b"short", bytes(32) + b"other"], ids=("empty", "short", "other")
)
def test_a_damaged_cache_is_dropped_with_a_line(
    store: Store, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(key(store), content)
    CompileCache(store, "first", NUMERICS).load()
    assert "[compile] cannot use the kept code, compiling again" in caplog.text
    assert f"{key(store)} does not match its checksum" in caplog.text


def test_a_machine_that_cannot_take_the_kept_code_makes_it_anew(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    importlib.import_module("torch._inductor.runtime.autotune_cache")  # has its kind known
    with CacheArtifactManager.with_fresh_cache():
        CacheArtifactManager.record_artifact("autotune", "config.json", {"XBLOCK": 1})
        made = torch.compiler.save_cache_artifacts()
    assert made is not None
    CompileCache(store, "first", NUMERICS)._write(made[0])
    # As on a disk that is full: torch's folder cannot be made.
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    CompileCache(store, "first", NUMERICS).load()
    assert "[compile] cannot use the kept code, compiling again: [Errno" in caplog.text


def test_without_a_cache_nothing_is_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        CompileCache(store, "first", NUMERICS).load()
    assert caplog.text == ""


def test_nothing_is_kept_before_something_was_compiled(store: Store) -> None:
    cache = CompileCache(store, "first", NUMERICS)
    cache.stepped(has_compiled=False)
    assert store.sizes("") == {}


def test_a_run_that_compiles_nothing_keeps_nothing(run: Run) -> None:
    run.options = ["--keep-compiled", "--override=epochs=1"]
    assert run.attempt() == 0
    assert not any(name.endswith("compiled.bin") for name in run.store.sizes(""))


def test_no_stage_waits_for_what_is_being_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    is_sending, may_end, has_ended = (threading.Event() for _ in range(3))

    def stuck(*_: object) -> None:
        is_sending.set()
        may_end.wait(HUNG_SECONDS)
        has_ended.set()

    monkeypatch.setattr(CompileCache, "_write", stuck)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"made", None))
    run.options = ["--keep-compiled", "--override=compile_mode=default", "--override=epochs=1"]
    assert run.attempt() == 0
    assert is_sending.is_set() and not has_ended.is_set()
    may_end.set()


def on_a_new_machine(folder: Path) -> Callable[[], None]:
    """Let forked attempts find nothing that an earlier one has compiled on this machine."""
    numbers = iter(range(10))

    def at_start() -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / str(next(numbers)))
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    return at_start


def ends_with(run: Run, code: int, *more: str) -> None:
    process = run.fork(*more)
    process.join(600)
    assert process.exitcode == code


def notice_once_kept(run: Run) -> None:
    """Send a notice once what both stages have compiled is kept."""
    while sum(name.endswith("compiled.bin") for name in run.store.sizes("")) < 2:
        time.sleep(0.1)
    notice()


@pytest.mark.slow
def test_a_replacement_loads_what_was_compiled_and_the_interrupted_run_has_the_same_bits(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run.options = ["--override=compile_mode=default", "--override=epochs=1"]
    run.at_start = on_a_new_machine(tmp_path / "without")
    ends_with(run, 0)
    plain = (run.losses(), run.head.weights_sha256)
    run.uri += "-kept"
    run.options.append("--keep-compiled")
    run.at_start = on_a_new_machine(tmp_path / "first")
    tiny.HOOKS["second"] = lambda step: notice_once_kept(run) if step == 2 else None
    ends_with(run, 75)
    tiny.HOOKS.clear()
    assert "kept parts" not in capfd.readouterr().out
    run.at_start = on_a_new_machine(tmp_path / "second")
    ends_with(run, 0)
    assert "[compile] " in (said := capfd.readouterr().out)
    assert "kept parts" in said
    assert (run.losses(), run.head.weights_sha256) == plain

"""The ladder against a real limit of memory, in processes of their own."""

import ctypes
import io
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.errors import UserError
from tests.training.big import BIG, BigConfig
from tests.training.forked import Done, command, in_fork
from tests.training.runs import WORKLOAD
from tests.training.tiny import TINY, TinyConfig, tiny_config
from training.durable.errors import RunFailedError
from training.durable.record.head import CheckpointEntry, Head, checkpoint_name
from training.durable.save.tensors.memory import data_bytes
from training.durable.store.folder import FolderStore
from training.engine.stage_checks import problems
from training.preflight import preflight
from training.preflight.preflight import (
    TrialRequest,
    _apply_rungs,
    _Trial,
    adapted,
    resolve_adaptation,
)
from training.registry import WORKLOADS, load_workload, resolve_config
from training.rungs import KINDS, offered_rung
from training.settings import changed
from training.workload import Rung, Train

NAME = "tests.training.big:BIG"
# The recipe's step needs about 400 MiB as it is and half of that in micro-batches of 4; 128 MiB
# of the limit are for the rest of the process.
LIMIT = "--memory-limit-mib=470"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from training.cli.main import main

    out = tmp_path_factory.mktemp("big") / "data"
    assert main(["data", "make", f"--workload={NAME}", f"--out={out}", "--count=10"]) == 0
    return out


def run(dataset: Path, uri: Path, *more: str, recipe: str = "plain") -> Done:
    """A run in a fork of this process, and its trials in forks of that."""
    arguments = ["run", f"--workload={NAME}", f"--recipe={recipe}"]
    arguments += [f"--dataset-uri={dataset}", f"--run-uri={uri}", *more]
    return command(arguments, try_in_forks)


def use_up_freed_memory() -> None:
    """What tests before have freed, also in threads, where tensors find room beyond any limit."""
    malloc = ctypes.CDLL(None).malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() or soft, hard))
    for size in (2**22, 2**20, 2**18):
        while malloc(size):
            pass
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def try_in_forks() -> None:
    use_up_freed_memory()

    def try_it(words: Sequence[str], *, input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        assert list(words[1:]) == ["-m", "training.preflight.preflight"]

        def act() -> str:
            sys.stdin = io.StringIO(input)
            with redirect_stdout(io.StringIO()) as out:
                assert preflight.main() == 0
            return out.getvalue()

        return subprocess.CompletedProcess(list(words), 0, in_fork(act), "")

    names = SimpleNamespace(run=try_it)
    preflight.subprocess = names  # type: ignore[attr-defined]


def test_a_run_that_does_not_fit_takes_the_rung_that_does(dataset: Path, tmp_path: Path) -> None:
    uri, few = tmp_path / "run", "--override=has_all_rungs=false"
    done = run(dataset, uri, LIMIT, few)
    assert done.code == 0, done.err
    assert "[memory] the recipe unchanged: out of memory in stage 'shrink'" in done.out
    assert "[memory] micro-batch 4: fits" in done.out
    record = json.loads((uri / "adaptation.json").read_text())
    assert record["rungs"] == ["micro-batch 4"]
    assert [trial["outcome"] for trial in record["trials"]] == ["out of memory", "fits"]
    receipt = json.loads((uri / "receipt.json").read_text())
    assert receipt["numerics_key"]["stages"]["shrink"]["micro_batch"] == 4


def test_fails_with_advice_when_memory_runs_out_in_mid_run(dataset: Path, tmp_path: Path) -> None:
    done = run(dataset, tmp_path / "run", "--memory-limit-mib=250", "--no-adapt")
    assert done.code == 1
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("error: memory ran out: ")
    assert "without --no-adapt it tries these rungs (optimizer sgd, activations again, " in last
    head = json.loads((tmp_path / "run" / "head.json").read_text())
    assert head["state"] == "released", "another machine may have more memory"


@pytest.mark.slow
def test_rungs_are_taken_in_order_and_stay_for_the_run(dataset: Path, tmp_path: Path) -> None:
    uri = tmp_path / "run"
    done = run(dataset, uri, "--memory-limit-mib=290")
    assert done.code == 0, done.err
    record = json.loads((uri / "adaptation.json").read_text())
    assert record["rungs"][:3] == ["optimizer sgd", "activations again", "micro-batch 4"]
    # Another attempt has all the memory, but the first decision is binding.
    head = json.loads((uri / "head.json").read_text())
    head |= {"state": "released", "checkpoints": []}
    (uri / "head.json").write_text(json.dumps(head))
    again = run(dataset, uri)
    assert again.code == 0, again.err
    assert "[memory] this run continues with: optimizer sgd, activations again" in again.out
    assert "fits" not in again.out


@pytest.mark.slow
def test_fails_for_batch_norm_in_smaller_micro_batches(dataset: Path, tmp_path: Path) -> None:
    few = "--override=has_all_rungs=false"
    done = run(dataset, tmp_path / "run", LIMIT, few, recipe="normed")
    assert done.code == 1
    assert "[memory] micro-batch 4: refused (stage 'shrink' has BatchNorm" in done.out
    assert "even with micro-batch 4, micro-batch 2, micro-batch 1; use a size" in done.err


@pytest.mark.parametrize("name", [*WORKLOADS, NAME])
def test_every_workload_has_the_protocol_and_its_rungs_the_ladder_s_order(name: str) -> None:
    workload = load_workload(name)
    assert problems(workload) == []
    assert name == NAME or workload.nominal_samples.keys() == workload.recipes.keys()
    for make in workload.recipes.values():
        kinds = [rung.name.split()[0] for rung in workload.rungs(make())]
        assert kinds == sorted(kinds, key=KINDS.index)


@pytest.mark.parametrize(("max_side", "kernel"), [(160, "reference"), (256, "deterministic")])
def test_a_trial_s_steps_take_the_kernels_of_an_attempt(max_side: int, kernel: str) -> None:
    workload = load_workload("detection")
    config = resolve_config(workload, "laptop", {"max_side": max_side, "micro_batch": 1})
    (stage,) = (each for each in workload.stages(config) if isinstance(each, Train))
    (model,) = islice(
        preflight.train_steps(stage, config, stage.example(1), torch.device("cpu"), 1), 1
    )
    assert {m.implementation for m in model.modules() if hasattr(m, "implementation")} == {kernel}


def test_a_smaller_micro_batch_is_refused_where_the_model_computes_with_it() -> None:
    config = tiny_config()
    half = changed(config, micro_batch=2)
    before, after = TINY.stages(config), TINY.stages(half)
    assert "has BatchNorm, which computes with its micro-batch" in preflight._refusal(
        before, after, config
    )
    assert preflight._refusal(before, before, config) == ""


def test_a_trial_that_the_system_kills_had_too_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = SimpleNamespace(returncode=-9, stdout="", stderr="")
    monkeypatch.setattr(preflight.subprocess, "run", lambda *_, **given: killed)
    request = TrialRequest(workload="w", recipe="r", overrides={}, memory_limit_mib=None)
    assert preflight._try(request, ()).outcome == "out of memory"


def test_rungs_are_applied_to_the_stages() -> None:
    config = BigConfig()
    names = ["activations again", "micro-batch 2"]
    assert _apply_rungs(BIG, config, names) == changed(
        BigConfig(keeps_activations=False), micro_batch=2
    )
    (stage,) = adapted(BIG, names).stages(config)  # type: ignore[arg-type]
    assert isinstance(stage, Train)
    assert stage.settings.micro_batch == 2


@pytest.mark.parametrize(
    ("fitting", "words"),
    [
        ("offered width=2", "; it fits with --override size=8 --override width=2, which changes"),
        ("nothing", "even with micro-batch 1; use a size with more memory"),
    ],
)
def test_what_changes_the_model_is_tried_and_offered_but_never_taken(
    monkeypatch: pytest.MonkeyPatch, fitting: str, words: str
) -> None:
    class Offering:
        def rungs(self, c: Any) -> list[Rung]:
            taken = Rung(name="micro-batch 1", apply=lambda c: c)
            sizes = [offered_rung(size=16), offered_rung(size=8)]
            return [taken, *sizes, offered_rung(width=2), offered_rung(width=1)]

    def trial(request: TrialRequest, names: tuple[str, ...]) -> _Trial:
        fits = bool(names) and names[-1] == fitting
        outcome = "fits" if fits else "out of memory"
        return _Trial(rungs=names, outcome=outcome, message="", peak_bytes=None)

    monkeypatch.setattr(preflight, "_try", trial)
    request = TrialRequest(workload="w", recipe="r", overrides={}, memory_limit_mib=None)
    with pytest.raises(RunFailedError) as refusal:
        preflight._climb(request, Offering().rungs(None))
    assert words in str(refusal.value)
    assert str(refusal.value).endswith("use a size with more memory")


@pytest.fixture
def torn(tmp_path: Path) -> FolderStore:
    """A run whose adaptation.json is torn."""
    store = FolderStore(tmp_path / "run")
    store.put("adaptation.json", b'{"format": 1, "rungs"')
    return store


def resolve(store: FolderStore, *, may_adapt: bool) -> tuple[str, ...]:
    request = TrialRequest(workload=WORKLOAD, recipe="quick", overrides={}, memory_limit_mib=None)
    return resolve_adaptation(store, request, TINY, TinyConfig(), may_adapt=may_adapt)


@pytest.mark.slow
def test_what_no_attempt_has_trained_with_is_measured_again(torn: FolderStore) -> None:
    assert resolve(torn, may_adapt=True) == ()
    found = torn.get("adaptation.json")
    assert found is not None
    assert [trial["outcome"] for trial in json.loads(found.data)["trials"]] == ["fits"]


def test_fails_where_a_torn_adaptation_was_trained_with_or_cannot_be_measured(
    torn: FolderStore,
) -> None:
    with pytest.raises(UserError, match=r"adaptation\.json is damaged or was edited"):
        resolve(torn, may_adapt=False)
    one = CheckpointEntry(
        name=checkpoint_name(7, 1), step=7, stage="shrink", epoch=0, kind="periodic", files=()
    )
    head = Head(run_id="r", generation=1, writer="i", nonce="n", checkpoints=(one,))
    torn.put("head.json", head.to_bytes())
    with pytest.raises(UserError, match=r"adaptation\.json is damaged or was edited"):
        resolve(torn, may_adapt=True)

"""For every test: the environment's own tools, long files first, no signal handler left behind."""

import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract import description

# What collection makes lives until the end, in every fork too: looking for garbage in it costs a
# sixth of all.
gc.disable()
os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
# Within a git hook, a test's commits would be the user's; her own settings are nobody's here.
for name in [name for name in os.environ if name.startswith("GIT_")]:
    del os.environ[name]
for number, setting in enumerate(("commit.gpgSign=false", f"core.hooksPath={os.devnull}")):
    name, value = setting.split("=")
    os.environ |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    os.environ["GIT_CONFIG_COUNT"] = str(number + 1)
# A proxy would get the requests of a test's own clients to this machine.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1,localhost".lstrip(",")
# The tests run in several processes: each, and its children, on one thread. More would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Half of a synthesis is CDK's own validation, which examples with an app of their own leave on.
os.environ.setdefault("CDK_VALIDATION", "false")
# A worker of xdist ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each worker takes the next file as a whole, so those that take long come first; one of them at the
# end would run alone. The demo mostly waits, for a minute or more, and so do the two of machines
# without root; the others compute for over nine seconds each.
LONGEST_FIRST = (
    "rehearsal/test_demo.py",
    "rehearsal/drills/test_drills.py",
    "userdata/test_sagemaker_script.py",
    "training/proof/torture/test_command.py",
    "simulation/test_simulation.py",
    "training/durable/attempt/test_ranks.py",
    "training/durable/save/tensors/test_sharded_saves.py",
    "userdata/test_boot_failures.py",
    "userdata/test_program_environment.py",
    "training/proof/check/test_check.py",
    "training/workloads/trajectory/test_stages.py",
    "stacks/guard/test_calls_that_fail.py",
    "training/preflight/test_any_model.py",
    "training/engine/test_divergence.py",
    "userdata/test_boot.py",
    "training/durable/attempt/test_extra_time.py",
    "training/durable/save/tensors/test_sharded_runs.py",
    "embedded_aws/cloudformation/test_cdk.py",
    "across/test_torture_s3.py",
    "userdata/test_interruption.py",
    "rehearsal/alarms/test_trial.py",
    "stacks/doctor/test_doctor.py",
)
# With `-m gpu`, on a machine that may have only what the measurements need, all else is left out.
GPU_MARK = "mark.gpu"
# Packages by the group that installs them.
GROUPS = {
    **dict.fromkeys(("transformers", "accelerate", "lightning", "timm"), "examples"),
    **dict.fromkeys(("av", "tensorboard"), "formats"),
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# How long an example takes says how busy the machine is.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("busy", settings(), deadline=None, suppress_health_check=slow)
    settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    if find_spec("pytest_timeout") is None:
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "without pytest-timeout, nobody's")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr != "gpu":
        return None
    files = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    return not any(GPU_MARK in file.read_text(encoding="utf-8") for file in files) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    # The others in any order but the alphabet's: the files of one folder that mostly wait would
    # leave all workers waiting at once. Of 300 orders this one spreads them well.
    root = Path(__file__).parents[1]
    names = {item.path: f"1{item.path.relative_to(root).as_posix()}" for item in items}
    drawn = {path: hashlib.md5(name.encode()).hexdigest() for path, name in names.items()}
    items.sort(key=lambda item: (places.get(item.path, len(places)), drawn[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skip a test of what only a group installs; in CI a test of the house wants it there."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name not in GROUPS:
            raise
        pytest.skip(f"needs {error.name}: make setup WITH={GROUPS[error.name]}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _signal_handlers_are_restored() -> Iterator[None]:
    """A handler that a test leaves behind would act in the tests after it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.fixture(autouse=True)
def _workloads_are_described_in_forks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No interpreter imports torch for each; tests/across/test_description.py has real ones."""
    if request.path.name != "test_description.py":

        def run(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
            if find_spec("torch") is None:
                pytest.skip("the trainer, which this asks, needs torch")
            from tests.forked_trainer import run_in_fork

            return run_in_fork(*words, **options)

        monkeypatch.setattr(description, "subprocess", SimpleNamespace(run=run))


@pytest.fixture(autouse=True)
def _determinism_is_not_left_on() -> None:
    """A run in this process sets it for the whole process; each test starts with torch's own."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _fake_tensors_stay_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process they would make a later test's backward pass in a fork fail.

    tests/training/forked.py runs work in a fork.
    """
    module = sys.modules.get("torch._subclasses.fake_tensor")
    if module is None:
        return
    here, enter = os.getpid(), module.FakeTensorMode.__enter__

    def enter_in_a_fork(mode: object) -> object:
        assert os.getpid() != here, "fake tensors outside a fork: use tests/training/forked.py"
        return enter(mode)

    monkeypatch.setattr(module.FakeTensorMode, "__enter__", enter_in_a_fork)

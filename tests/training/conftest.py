"""A small dataset, both kinds of store, and runs in this process or in a forked one."""

import functools
import importlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.training import hooks, tiny
from tests.training.forked import ForkedTrainer, run_module
from tests.training.runs import AVERAGED, SHARDED, WORKLOAD, Run
from training.artifacts.prepare import _MAKER
from training.cli import data, sweep
from training.cli.main import main
from training.durable.attempt.notice import Interruption
from training.durable.report.progress import configure_logging
from training.numerics import ENGINE, code_fingerprint
from training.proof.torture import small_workload

# What the first optimizer, ranks and models that ranks share import late, and a check's counting.
IMPORTED_ONCE = (
    "numpy.ctypeslib",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.fsdp",
    "torch.utils._sympy.functions",
    "torch.utils._sympy.reference",
)


@pytest.fixture(scope="session", autouse=True)
def _done_once() -> None:
    """It takes a second or two, in each of hundreds of attempts that the tests fork.

    The code's fingerprint, of all of tests/ for the tiny workload, is kept where it is made; where
    there is no GPU, torch would look for the driver again with each operation of some runs; and
    the parser of a command, which keeps nothing of what it parsed, is made once.
    """
    commands = importlib.import_module(main.__module__)
    setattr(commands, "_parser", functools.cache(commands._parser))  # noqa: B010
    commands._parser("run")
    if torch.cuda.device_count() == 0:
        torch.cuda._cached_device_count = 0
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    for module in (tiny.__name__, small_workload.__name__):
        code_fingerprint(module, *ENGINE)
        code_fingerprint(module, _MAKER)


@pytest.fixture(autouse=True)
def _sizing_is_elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import datasets as on a machine, without sizing, whose advice takes half of the time.

    The files that read the advice have it, in forks; so do imports that run as processes.
    """
    run: Callable[..., subprocess.CompletedProcess[str]] = run_module
    if request.path.name not in ("test_other_formats.py", "test_data.py"):
        run = lacking
    monkeypatch.setattr(data, "subprocess", SimpleNamespace(run=run))


def lacking(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
    """As where a module is not installed."""
    return subprocess.CompletedProcess("sizing", 1, "", "No module named sizing")


@pytest.fixture(autouse=True)
def _logging() -> None:
    """As `python -m training` has it; children that tests fork inherit it."""
    configure_logging()


@pytest.fixture(autouse=True)
def _no_hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts without hooks; what listens for signals is remembered for them."""
    listen = Interruption.listen

    def remember(self: Interruption) -> None:
        hooks.LISTENING.append(self)
        listen(self)

    monkeypatch.setattr(Interruption, "listen", remember)
    tiny.HOOKS.clear()
    yield
    tiny.HOOKS.clear()
    tiny.LOSSES.clear()
    hooks.LISTENING.clear()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "tiny"
    code = main(["data", "make", "--workload", WORKLOAD, "--out", str(out), "--count", "42"])
    assert code == 0
    return out


@pytest.fixture
def forked_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a sweep are forks of this process."""
    names = SimpleNamespace(Popen=ForkedTrainer, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(sweep, "subprocess", names)


def _of_another_environment(folder: Path) -> Iterator[str]:
    command = [folder / ".venv/bin/python", "-m", "embedded_aws", "--port=0"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        from tests.training.serving import KEYS

        printed: dict[str, str] = {}
        for line in process.stdout:
            printed |= dict(re.findall(r"(AWS_ENDPOINT_URL|AWS_ACCESS_KEY_ID)=(\S+)", line))
            if len(printed) == 2:
                endpoint = printed["AWS_ENDPOINT_URL"]
                KEYS[endpoint] = printed["AWS_ACCESS_KEY_ID"]
                yield endpoint
                break
        process.send_signal(signal.SIGINT)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The embedded AWS's own front, without the account that it fills at a start.

    EMBEDDED_AWS, if set, is the folder of another environment that has the embedded AWS.
    """
    if folder := os.environ.get("EMBEDDED_AWS"):
        yield from _of_another_environment(Path(folder))
        return
    # A machine with a GPU may have neither moto nor boto3.
    from embedded_aws.front import Front
    from tests.training.serving import served

    with served(Front({})) as endpoint:
        yield endpoint


@pytest.fixture
def bucket_uri(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    from tests.training.serving import new_bucket

    return new_bucket(s3_endpoint, monkeypatch)


@pytest.fixture(params=["folder", "s3"])
def store_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URI of each kind, where nothing is yet."""
    if request.param == "folder":
        return str(tmp_path / "store" / "run-1")
    return f"{request.getfixturevalue('bucket_uri')}/runs/run-1"


@pytest.fixture
def new_run(dataset: Path, tmp_path: Path) -> Callable[[str], Run]:
    def make(uri: str) -> Run:
        return Run(dataset=dataset, uri=uri, scratch=tmp_path / "scratch")

    return make


@pytest.fixture
def run(new_run: Callable[[str], Run], tmp_path: Path) -> Run:
    """A run in a folder."""
    return new_run(str(tmp_path / "runs" / "run-1"))


@pytest.fixture(scope="session")
def finished(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Makes a run that nothing interrupts, whatever the hooks of the test that asks first."""

    def make(*options: str, ranks: int = 1) -> Run:
        root, hooks = tmp_path_factory.mktemp("finished"), dict(tiny.HOOKS)
        uri, scratch = str(root / "runs" / "run-1"), root / "scratch"
        run = Run(dataset=dataset, uri=uri, scratch=scratch, options=list(options))
        tiny.HOOKS.clear()
        codes = [run.attempt()] if ranks == 1 else run.attempt_with_ranks(ranks)
        tiny.HOOKS.update(hooks)
        assert codes == [0] * ranks
        return run

    return make


@pytest.fixture(scope="session")
def whole(finished: Callable[..., Run]) -> Run:
    """The uninterrupted run that others are compared with."""
    return finished()


@pytest.fixture(scope="session")
def pair(finished: Callable[..., Run]) -> Run:
    """The uninterrupted run of two ranks."""
    return finished(ranks=2)


@pytest.fixture(scope="session")
def sharded(finished: Callable[..., Run]) -> Run:
    """The uninterrupted run of two ranks that share a model."""
    return finished(SHARDED, *AVERAGED, ranks=2)


@pytest.fixture
def sharded_run(run: Run) -> Run:
    """A run like `sharded`, in a folder."""
    run.options = [SHARDED, *AVERAGED]
    return run

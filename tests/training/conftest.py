"""A small dataset, both kinds of store, and runs in this process or in a forked one."""

import importlib
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from rehearsal.aws.front import Front
from tests.training import hooks, tiny
from tests.training.forked import ForkedTrainer
from tests.training.runs import AVERAGED, SHARDED, WORKLOAD, Run
from training.attempt.notice import Interruption
from training.cli import sweep
from training.cli.main import main
from training.report.log import configure_logging

# What the first optimizer, ranks and models that ranks share import late.
IMPORTED_ONCE = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.fsdp",
    "torch.utils._sympy.functions",
)


@pytest.fixture(scope="session", autouse=True)
def _imported_once() -> None:
    """It takes a second or two, in each of hundreds of attempts that the tests fork."""
    for name in IMPORTED_ONCE:
        importlib.import_module(name)


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


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


@pytest.fixture
def forked_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a sweep are forks of this process."""
    names = SimpleNamespace(Popen=ForkedTrainer, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(sweep, "subprocess", names)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The embedded AWS's own front, without the account that it fills at a start."""
    server = make_server("127.0.0.1", 0, Front({}), threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bucket_uri(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    bucket = f"bucket-{secrets.token_hex(6)}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}"


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
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run that others are compared with."""
    root = tmp_path_factory.mktemp("whole")
    run = Run(dataset=dataset, uri=str(root / "runs" / "run-1"), scratch=root / "scratch")
    assert run.attempt() == 0
    return run


@pytest.fixture(scope="session")
def pair(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run of two ranks."""
    root = tmp_path_factory.mktemp("pair")
    run = Run(dataset=dataset, uri=str(root / "runs" / "run-1"), scratch=root / "scratch")
    assert run.attempt_with_ranks(2) == [0, 0]
    return run


@pytest.fixture(scope="session")
def sharded(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run of two ranks that share a model."""
    root = tmp_path_factory.mktemp("sharded")
    run = Run(dataset=dataset, uri=str(root / "runs" / "run-1"), scratch=root / "scratch")
    run.options = [SHARDED, *AVERAGED]
    assert run.attempt_with_ranks(2) == [0, 0]
    return run


@pytest.fixture
def sharded_run(run: Run) -> Run:
    """A run like `sharded`, in a folder."""
    run.options = [SHARDED, *AVERAGED]
    return run

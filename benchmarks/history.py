"""What the history of a long run costs: 90 epochs of ImageNet, 450,450 steps in 20 attempts.

Each row is a process of its own, `python -m benchmarks.history ROW FOLDER STEPS`, so that its peak
of resident memory is its own.
"""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import boto3

from contract.keys import EVENTS, METRICS
from contract.metrics import small_key
from sizing.plan.finished_run import read_run
from training.record.events import Events
from training.record.head import Head
from training.record.metrics import Metrics
from training.record.run_config import RunConfig, now_utc
from training.record.sample_digest import sample_digest
from training.report.page import write_report
from training.report.receipt import conclude
from training.store.folder import FolderStore
from training.store.open import open_store
from training.store.protocol import Store

_REPOSITORY = Path(__file__).parent.parent
_NUM_SAMPLES, _BATCH = 1_281_167, 256
_STEPS_PER_EPOCH = -(-_NUM_SAMPLES // _BATCH)
_NUM_ATTEMPTS = 20
_STAGE = "classifier"
_EVALUATED = ("top1", "top5", "top1_with_flips", "top5_with_flips", "loss")
# Steps in the 5 s of a small object; between commits; repeated after an interruption.
_LINES, _COMMIT, _REPEATED = 15, 1500, 40
# Of the run in S3: small objects that its attempts left, events, and the time of each request.
_NUM_SMALL, _NUM_EVENTS, _REQUEST_SECONDS = 2700, 300, 0.02


def measure(*, steps: int) -> list[dict[str, Any]]:
    """Make the history and read it in every way; one row each."""
    # fsync is not what is measured: 30,000 of them would take minutes on a disk.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        return [_row(what, folder, steps) for what in _ROWS]


def _row(what: str, folder: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.history", what, folder, str(steps)]
    done = subprocess.run(command, cwd=_REPOSITORY, stdout=subprocess.PIPE, check=True, text=True)
    return {"what": what, **json.loads(done.stdout.splitlines()[-1])}


def _timed(store: Store, act: Callable[[], object]) -> dict[str, Any]:
    imported = _resident("VmRSS")
    began, cpu = time.perf_counter(), time.process_time()
    act()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    sizes = store.sizes(METRICS)
    return {
        "seconds": seconds,
        "CPU seconds": cpu_seconds,
        "peak resident MiB": round(_resident("VmHWM")),
        "of which imports": round(imported),
        "metrics objects": len(sizes),
        "MB": sum(sizes.values()) / 1e6,
    }


def _resident(name: str) -> float:
    """MiB of this process's memory; VmHWM is its peak."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024


def _write(folder: Path, steps: int) -> dict[str, Any]:
    store = FolderStore(folder / "run")

    def write() -> None:
        for generation in range(1, _NUM_ATTEMPTS + 1):
            first = steps * (generation - 1) // _NUM_ATTEMPTS + 1
            again = _REPEATED if generation > 1 else 0
            steps_of_it = range(first - again, steps * generation // _NUM_ATTEMPTS + 1)
            _write_attempt(store, generation, steps_of_it)

    return _timed(store, write)


def _write_attempt(store: Store, generation: int, steps: range) -> None:
    """Write as an attempt does that ends without warning: small objects, merged behind it."""
    from training.randomness import shuffled  # and with it torch

    metrics = Metrics(store, generation, "nonce", None)
    events = Events(store, f"machine-{generation}")
    events.emit("take-over", "ok", generation=generation)
    metrics.write("resume", step=steps[0] - 1)
    rng, orders = random.Random(generation), {}
    for step in steps:
        epoch, number = divmod(step - 1, _STEPS_PER_EPOCH)
        if epoch not in orders:
            orders = {epoch: shuffled(_NUM_SAMPLES, epoch, 1)}
        ids = orders[epoch][number * _BATCH : (number + 1) * _BATCH]
        _write_step(metrics, rng, step, ids)
        if step % _LINES == 0:
            metrics.flush()
        if number == _STEPS_PER_EPOCH - 1:
            found = {name: rng.random() for name in _EVALUATED}
            metrics.write("evaluation", stage=_STAGE, step=step, epoch=epoch, metrics=found)
        if step % _COMMIT == 0:
            events.emit("committed", "ok", step=step, kind="periodic", seconds=1.0)
    metrics.flush()
    metrics.close()


def _write_step(metrics: Metrics, rng: random.Random, step: int, ids: Any) -> None:
    """A line as the workload's runs have it: tests/training/imagenet compares them."""
    metrics.write(
        "step",
        stage=_STAGE,
        step=step,
        stage_step=step,
        epoch=(step - 1) // _STEPS_PER_EPOCH,
        loss=7 * rng.random(),
        lr=0.1 * rng.random(),
        samples_per_second=round(780 + 20 * rng.random(), 2),
        data_wait=round(rng.random() / 20, 4),
        **sample_digest(ids, _NUM_SAMPLES),
        metrics={"top1": rng.random()},
    )


def _end(folder: Path, steps: int) -> dict[str, Any]:
    store = FolderStore(folder / "run")
    return _timed(store, lambda: conclude(store, _config(), _head()))


def _report(folder: Path, steps: int) -> dict[str, Any]:
    store = FolderStore(folder / "run")

    def report() -> None:
        history = write_report(store, _config(), _head())
        assert len(history.steps) == steps
        assert sum(a.num_repeated for a in history.attempts) == _REPEATED * (_NUM_ATTEMPTS - 1)

    return _timed(store, report)


def _tensorboard(folder: Path, steps: int) -> dict[str, Any]:
    from training.report.tensorboard import write_event_files

    store = FolderStore(folder / "run")
    return _timed(store, lambda: write_event_files(store, folder / "logs"))


def _review(folder: Path, steps: int) -> dict[str, Any]:
    store = FolderStore(folder / "run")
    receipt = {"run_id": "run", "workload": "imagenet", "recipe": "full", "seconds": 1.0}
    store.put("receipt.json", json.dumps(receipt).encode())
    return _timed(store, lambda: read_run(folder / "run"))


def _end_in_s3(folder: Path, steps: int) -> dict[str, Any]:
    with _slow_s3() as uri:
        boto3.client("s3").create_bucket(Bucket="bucket")
        store = open_store(uri)
        with ThreadPoolExecutor(16) as pool:
            numbers = range(1, _NUM_SMALL + 1)
            list(pool.map(lambda number: store.put(*_small_object(number)), numbers))
        events = Events(store, "machine")
        events.emit("take-over", "ok", generation=1)
        for number in range(1, _NUM_EVENTS):
            events.emit("committed", "ok", step=number, kind="periodic", seconds=1.0)
        assert len(store.sizes(METRICS)) + len(store.sizes(EVENTS)) == _NUM_SMALL + _NUM_EVENTS
        return _timed(store, lambda: conclude(store, _config(), _head()))


def _small_object(number: int) -> tuple[str, bytes]:
    lines = [
        f'{{"kind":"step","generation":1,"stage":"resnet","step":{step},"loss":1.5}}\n'
        for step in range(number * _LINES, (number + 1) * _LINES)
    ]
    return small_key("0001-nonce", number), "".join(lines).encode()


@contextmanager
def _slow_s3() -> Iterator[str]:
    """The embedded S3 in a process of its own; each request takes longer."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    server.start()
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    os.environ |= dict.fromkeys(names, "testing") | {"AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{ours.recv()}"
    try:
        yield "s3://bucket/runs/run"
    finally:
        server.terminate()
        server.join()


def _serve(port: Connection) -> None:
    from werkzeug.serving import WSGIRequestHandler, make_server

    from rehearsal.aws.front import Front

    class Quiet(WSGIRequestHandler):
        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    front = Front({})

    def late(environ: dict[str, Any], start: Any) -> Any:
        time.sleep(_REQUEST_SECONDS)
        return front(environ, start)

    server = make_server("127.0.0.1", 0, late, threaded=True, request_handler=Quiet)
    port.send(server.server_port)
    server.serve_forever()


def _head() -> Head:
    return Head(run_id="run", generation=_NUM_ATTEMPTS, writer="w", nonce="n", state="finished")


def _config() -> RunConfig:
    return RunConfig(
        run_id="run",
        workload="imagenet",
        recipe="full",
        overrides={},
        config={},
        dataset="imagenet",
        bundle_uri=None,
        numerics_key={},
        writer="w",
        created_at=now_utc(),
    )


_ROWS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "write, merging behind it": _write,
    "end of the run: merge the rest, report": _end,
    "report": _report,
    "TensorBoard export": _tensorboard,
    "sizing review": _review,
    "end of a run of 3,000 small objects in S3, 20 ms a request": _end_in_s3,
}

if __name__ == "__main__":
    print(json.dumps(_ROWS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))

"""One run of the speed table: two trees of this project, alternated, beside peers.

`python benchmarks/speed_table.py BEFORE AFTER [ROW…]` with `s5cmd` in PATH, from an environment
with Lightning and transformers. Rows are medians of five rounds after one that warms up; CPU
seconds count the processes' children. Clients and the server of objects share the machine.
"""

import hashlib
import http.client
import json
import mmap
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ROUNDS = 5
PYTHON = sys.executable
SINK = str(Path(__file__).with_name("s3_sink.py").resolve())
MEBIBYTE = 1024 * 1024
SIZE = 512 * MEBIBYTE


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def living_cpu() -> float:
    """CPU seconds of this process and of its living children."""
    own = time.process_time()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2].split()
            own += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own


def environment(tree: str, **more: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**known, "PYTHONPATH": tree, **more}


def timed(command: Sequence[str], tree: str, env: Mapping[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one command."""
    before, began = children_cpu(), time.perf_counter()
    done = subprocess.run(
        command, cwd=tree, env=dict(env), capture_output=True, text=True, check=False
    )
    taken = time.perf_counter() - began, children_cpu() - before
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout[-1000:]} {done.stderr[-2000:]}")
    return taken


def alternated(
    ways: Mapping[str, Callable[[], Sequence[float]]], row: str, units: Sequence[str], each: float
) -> None:
    """Print the medians, and least and most of the last column, divided by `each`."""
    found: dict[str, list[Sequence[float]]] = {way: [] for way in ways}
    for number in range(ROUNDS + 1):
        for way, measure in ways.items():
            values = measure()
            if number:
                found[way].append(values)
    for way, rounds in found.items():
        columns = [[value / each for value in column] for column in zip(*rounds, strict=True)]
        pairs = zip(units, columns, strict=True)
        said = ", ".join(
            f"{unit} {statistics.median(c):.3f} ({min(c):.3f} to {max(c):.3f})" for unit, c in pairs
        )
        print(f"{row:16} {way:10} {said}, load {os.getloadavg()[0]:.1f}", flush=True)


@contextmanager
def sink(*, is_secure: bool = False) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the port of plain HTTP and the environment of its clients."""
    with tempfile.TemporaryDirectory() as folder:
        certificate = str(Path(folder, "cert.pem"))
        words = [PYTHON, SINK]
        if is_secure:
            made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
            named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
            files = ["-keyout", str(Path(folder, "key.pem")), "-out", certificate]
            subprocess.run(
                ["openssl", "req", "-x509", *made, *named, *files], check=True, capture_output=True
            )
            words.append(certificate)
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            plain, *secure = server.stdout.readline().split()
            url = f"https://localhost:{secure[0]}" if is_secure else f"http://127.0.0.1:{plain}"
            secrets = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            urls = {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url}
            region = {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
            trusted = {"AWS_CA_BUNDLE": certificate, "SSL_CERT_FILE": certificate}
            yield int(plain), {**secrets, **urls, **region, **(trusted if is_secure else {})}
            server.kill()


def syncs(
    trees: Mapping[str, str], row: str, count: int, size: int, *, is_secure: bool = False
) -> None:
    from xxhash import xxh3_128

    out = Path("/dev/shm/speed_table")
    with sink(is_secure=is_secure) as (port, env):
        server, entries = http.client.HTTPConnection("127.0.0.1", port), []
        for number in range(count):
            body, name = os.urandom(size), f"{number:06d}.bin"
            server.request("PUT", f"/keep/data/{name}", body=body)
            server.getresponse().read()
            sums = {
                "sha256": hashlib.sha256(body).hexdigest(),
                "xxh128": xxh3_128(body).hexdigest(),
            }
            entries.append({"name": name, "bytes": size, **sums})
        manifest = {"format": 1, "workload": "x", "name": "data", "files": entries, "meta": {}}
        server.request("PUT", "/keep/data/manifest.json", body=json.dumps(manifest))
        server.getresponse().read()

        def fetched(tree: str, command: Sequence[str]) -> tuple[float, float]:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            wall, cpu = timed(command, tree, environment(tree, **env))
            assert len(list(out.glob("*.bin"))) == count
            return wall, cpu

        uri = "s3://keep/data"
        ours = [PYTHON, "-m", "training", "data", "sync", "--dataset-uri", uri, "--out", str(out)]
        ways: dict[str, Callable[[], Sequence[float]]] = {
            name: lambda tree=tree: fetched(tree, ours)  # type: ignore[misc]
            for name, tree in trees.items()
        }
        ways["s5cmd"] = lambda: fetched("/tmp", ["s5cmd", "cp", f"{uri}/*", f"{out}/"])
        alternated(ways, row, ("wall s/GB", "CPU s/GB"), count * size / 1e9)
    shutil.rmtree(out, ignore_errors=True)


def in_shared_memory() -> Any:
    """Return a checkpoint's file in memory that another process can map."""
    from training.durable.store.transfer import Contents

    class Shared(Contents):
        name = "state.safetensors"

        def __init__(self) -> None:
            self.memory = os.memfd_create("checkpoint")
            os.ftruncate(self.memory, SIZE)
            self.mapped = mmap.mmap(self.memory, SIZE)
            for first in range(0, SIZE, MEBIBYTE):
                self.mapped[first : first + MEBIBYTE] = os.urandom(MEBIBYTE)

        @property
        def size(self) -> int:
            return SIZE

        def read(self, start: int, stop: int, spare: Any) -> memoryview:
            return memoryview(self.mapped)[start:stop]

    return Shared()


def checkpoint() -> None:
    """Upload a checkpoint and read it again, three times; print CPU and wall seconds a GB."""
    from training.durable.store.s3 import S3Store
    from training.durable.store.transfer import TransferProgress, receive, send

    store, file, found = S3Store("keep", "run"), in_shared_memory(), []
    for number in range(3):
        at, began = living_cpu(), time.perf_counter()
        (entry,) = send(store, "x/", [file], TransferProgress())
        up, wall = living_cpu() - at, time.perf_counter() - began
        at, began = living_cpu(), time.perf_counter()
        assert receive(store, "x/state.safetensors", entry, lambda at, data: None)
        down, restored = living_cpu() - at, time.perf_counter() - began
        if number:
            found.append([wall, up, restored, down])
    means = [1e9 / SIZE * sum(column) / len(found) for column in zip(*found, strict=True)]
    print(json.dumps(means))


def small_steps() -> Callable[[], None]:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    block = [nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()]
    model = nn.Sequential(*(nn.Sequential(*block) for _ in range(24)))
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(8, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def beside() -> None:
    """Print the share of its steps that a training keeps by the wall, beside uploads in a row."""
    from training.durable.store.s3 import S3Store
    from training.durable.store.transfer import TransferProgress, send

    store, file, step = S3Store("gone", "run"), in_shared_memory(), small_steps()
    going, done = threading.Event(), threading.Event()

    def upload() -> None:
        while not done.is_set():
            if going.wait(0.1):
                send(store, "x/", [file], TransferProgress())
                sent.append(time.perf_counter())

    sent: list[float] = []
    thread = threading.Thread(target=upload, daemon=True)
    thread.start()
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(6):
        for is_beside in (False, True):
            (going.set if is_beside else going.clear)()
            time.sleep(1.0)  # the last upload ends; the first begins
            count, began = 0, time.perf_counter()
            while time.perf_counter() - began < 3.0:
                step()
                count += 1
            if number:
                rates[is_beside].append(count)
    done.set()
    kept = statistics.median(rates[True]) / statistics.median(rates[False])
    each = statistics.median(b - a for a, b in pairwise(sent))
    print(json.dumps([kept, SIZE / 1e9 / each]))
    os._exit(0)


_TIMES: list[float] = []
_STEPS, _WINDOW = 1100, 50


def marked() -> None:
    """Count a step of one of the trainers."""
    _TIMES.append(time.process_time())


def _print_step() -> None:
    """Print the lower quartile of a step's CPU milliseconds over windows, after the first 100."""
    marks = _TIMES[100::_WINDOW]
    taken = [1e3 * (b - a) / _WINDOW for a, b in pairwise(marks)]
    print(json.dumps([statistics.quantiles(taken, n=4)[0]]), flush=True)


def _model() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def _data() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    count = 32 * 100
    return torch.randn(count, 256, generator=generator), torch.arange(count) % 10


def _pairs() -> Any:
    from torch.utils.data import Dataset

    class Pairs(Dataset[Any]):
        def __init__(self) -> None:
            self.x, self.y = _data()

        def __len__(self) -> int:
            return len(self.y)

        def __getitem__(self, index: int) -> Any:
            return self.x[index], self.y[index]

    return Pairs()


def bare() -> None:
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    model, loader = _model(), DataLoader(_pairs(), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_STEPS // 100):
        for x, y in loader:
            marked()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    _print_step()


def lightning() -> None:
    import lightning as L
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: Any, number: int) -> Any:
            marked()
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.set_num_threads(1)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    with tempfile.TemporaryDirectory() as name:
        trainer = L.Trainer(
            max_steps=_STEPS, accelerator="cpu", logger=False, default_root_dir=name, **quiet
        )
        trainer.fit(Module(), DataLoader(_pairs(), batch_size=32, shuffle=True))
    _print_step()


def huggingface() -> None:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from transformers import Trainer, TrainingArguments

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def forward(self, x: Any, labels: Any) -> Any:
            marked()
            found = self.model(x)
            return {"loss": F.cross_entropy(found, labels), "logits": found}

    def collate(items: Sequence[Any]) -> Any:
        x, y = zip(*items, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(y)}

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        arguments = TrainingArguments(
            output_dir=name,
            max_steps=_STEPS,
            per_device_train_batch_size=32,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=_STEPS,
            optim=os.environ.get("OPTIM", "adamw_torch"),
        )
        Trainer(Module(), arguments, data_collator=collate, train_dataset=_pairs()).train()
    _print_step()


_WORKLOAD = """
import atexit, os, sys
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from training import Loss, Partial, Samples, Settings, Train, Workload
sys.path.append(os.environ["TABLE"])
import speed_table as table

@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    seed: int = 0
    num_threads: int = 1
    deterministic: bool = False
    settings: Settings = Settings(
        steps=table._STEPS, global_batch=32, micro_batch=32, evaluate_every_steps=0,
        loader_workers=0)

class Rows(Samples):
    def __init__(self, data):
        self.x, self.y = data["x"], data["y"]
    def __len__(self):
        return len(self.y)
    def get(self, index, epoch, rng):
        return {"x": self.x[index], "y": self.y[index]}

@dataclass(frozen=True, kw_only=True, slots=True)
class Classify(Train):
    config: Config
    name: str = "classify"
    def model(self, i):
        return table._model()
    def optimizer(self, m):
        return torch.optim.AdamW(m.parameters(), lr=1e-3)
    def samples(self, i, split):
        return Rows(load_file(i.dataset.folder / "data.safetensors"))
    def loss(self, m, b, step, num_steps):
        table.marked()
        return Loss(total=F.cross_entropy(m(b["x"]), b["y"], reduction="sum"))
    def evaluate(self, m, b):
        return Partial(sums={"right": (1.0, self.weight(b))})

class Steps(Workload):
    name = "steps"
    recipes = {"only": Config}
    nominal_samples = {"only": {"train": 3200, "validation": 3200}}
    def stages(self, c):
        return (Classify(config=c),)
    def make_dataset(self, out, count, seed, progress):
        x, y = table._data()
        save_file({"x": x, "y": y}, out / "data.safetensors")
        progress(count, count)
        return {"count": count}

STEPS = Steps()
atexit.register(lambda: table._TIMES and table._print_step())
"""


def printed(command: Sequence[str], env: Mapping[str, str], folder: str) -> list[float]:
    """Return the numbers of the last line of JSON that a command prints."""
    done = subprocess.run(
        command, cwd=folder, env=dict(env), capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[") and "." in line]
    numbers = [line for line in lines if re.fullmatch(r"\[[\d., ]+\]", line)]
    if done.returncode or not numbers:
        raise RuntimeError(f"{command}: {done.stdout[-1500:]} {done.stderr[-1500:]}")
    return list(map(float, json.loads(numbers[-1])))


def steps(trees: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "steps.py").write_text(_WORKLOAD)
        this = str(Path(__file__).resolve())
        table = str(Path(this).parent)

        def trained(tree: str) -> list[float]:
            env = environment(f"{tree}:{name}", TABLE=table)
            shutil.rmtree(Path(name, "run"), ignore_errors=True)
            words = [PYTHON, "-m", "training"]
            own = ["--workload", "steps:STEPS"]
            if not Path(name, "data").exists():
                timed([*words, "data", "make", *own, "--count", "3200", "--out", "data"], name, env)
            run = [*words, "run", *own, "--recipe", "only", "--dataset-uri", "data"]
            return printed([*run, "--run-uri", "run", "--checkpoint-interval", "900s"], env, name)

        def peer(which: str, **more: str) -> Callable[[], list[float]]:
            return lambda: printed([PYTHON, this, which], environment("/tmp", **more), name)

        ways: dict[str, Callable[[], Sequence[float]]] = {"bare": peer("bare")}
        for key, tree in trees.items():
            ways[key] = lambda tree=tree: trained(tree)  # type: ignore[misc]
        ways["lightning"] = peer("lightning")
        ways["hf"] = peer("huggingface")
        ways["hf fused"] = peer("huggingface", OPTIM="adamw_torch_fused")
        alternated(ways, "step", ("CPU ms",), 1.0)


def restarts(trees: Mapping[str, str], workload: str, count: int) -> None:
    """From the start of the interpreter to the first step after a resume."""
    with tempfile.TemporaryDirectory() as name:
        words = [PYTHON, "-m", "training"]

        def start(tree: str, key: str, at: re.Pattern[str], stop: int) -> tuple[float, float]:
            run = ["--recipe", "laptop", "--dataset-uri", f"data-{key}", "--run-uri", f"run-{key}"]
            before, began, wall = children_cpu(), time.perf_counter(), 0.0
            with subprocess.Popen(
                [*words, "run", "--workload", workload, *run, "--checkpoint-interval", "15steps"],
                cwd=name,
                env=environment(tree),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if at.search(line) and not wall:
                        wall = time.perf_counter() - began
                        process.send_signal(stop)
            assert wall
            return wall, children_cpu() - before

        for key, tree in trees.items():
            made = ["data", "make", "--workload", workload, "--out", f"data-{key}"]
            timed([*words, *made, "--count", str(count)], name, environment(tree))
            start(tree, key, re.compile(r"^\[checkpoint\] step"), signal.SIGTERM)
            Path(name, f"run-{key}").rename(Path(name, f"kept-{key}"))

        def resumed(tree: str, key: str) -> tuple[float, float]:
            shutil.rmtree(Path(name, f"run-{key}"), ignore_errors=True)
            shutil.copytree(Path(name, f"kept-{key}"), Path(name, f"run-{key}"))
            return start(tree, key, re.compile(r": \d+/\d+ epoch "), signal.SIGKILL)

        ways = {key: lambda tree=tree, key=key: resumed(tree, key) for key, tree in trees.items()}
        alternated(ways, f"restart {workload}", ("wall s", "CPU s"), 1.0)


def apps(trees: Mapping[str, str]) -> None:
    ways = {
        key: lambda tree=tree: timed([PYTHON, "app.py"], tree, environment(tree))
        for key, tree in trees.items()
    }
    alternated(ways, "app.py", ("wall s", "CPU s"), 1.0)


def checkpoints(trees: Mapping[str, str], part: str, units: Sequence[str]) -> None:
    this = str(Path(__file__).resolve())
    with sink() as (_, env):
        ways = {
            key: lambda tree=tree: printed([PYTHON, this, part], environment(tree, **env), "/tmp")
            for key, tree in trees.items()
        }
        alternated(ways, part, units, 1.0)


def main() -> None:
    parts = {f.__name__: f for f in (checkpoint, beside, bare, lightning, huggingface)}
    if sys.argv[1] in parts:
        parts[sys.argv[1]]()
        return
    trees = dict(zip(("before", "after"), sys.argv[1:3], strict=True))
    columns = ("up wall s/GB", "up CPU s/GB", "down wall s/GB", "down CPU s/GB")
    rows: dict[str, Callable[[], None]] = {
        "app": lambda: apps(trees),
        "large": lambda: syncs(trees, "large, 1 GB", 2, 512_000_000),
        "larger": lambda: syncs(trees, "large, 4 GB", 8, 512_000_000),
        "larger-tls": lambda: syncs(trees, "large, TLS", 8, 512_000_000, is_secure=True),
        "small": lambda: syncs(trees, "small", 1500, 110_000),
        "smaller": lambda: syncs(trees, "small, 15,000", 15000, 110_000),
        "small-tls": lambda: syncs(trees, "small, TLS", 1500, 110_000, is_secure=True),
        "checkpoint": lambda: checkpoints(trees, "checkpoint", columns),
        "beside": lambda: checkpoints(trees, "beside", ("kept", "GB/s")),
        "step": lambda: steps(trees),
        "growth": lambda: restarts(trees, "growth", 40),
        "trajectory": lambda: restarts(trees, "trajectory", 132),
    }
    for name in sys.argv[3:] or rows:
        rows[name]()


if __name__ == "__main__":
    main()

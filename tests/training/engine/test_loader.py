"""A batch depends on seed, epoch and ids alone, and stays as it is; no worker is lost unnoticed."""

import gc
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import Exit, UserError
from tests.training.forked import in_fork
from tests.training.hooks import HUNG_SECONDS, interrupt_at
from tests.training.loading import (
    CPU,
    MICRO_BATCHES,
    Padded,
    Stacked,
    WithoutBytes,
    assert_same,
    loaded,
)
from tests.training.runs import Run, assert_equal, wait_for
from training.durable.attempt.notice import Interruption
from training.durable.errors import exit_code_of
from training.durable.tally import Tally
from training.engine import loader as engine_loader
from training.engine.batches import Maker, MicroBatch
from training.engine.loader import Loader, num_workers, read, write
from training.numerics import derive_seed, derive_seeds
from training.settings import LoaderWorkers


@pytest.mark.parametrize(
    "samples",
    [Stacked(), WithoutBytes(), Padded()],
    ids=["stacked", "stacked without bytes", "own collate"],
)
def test_batches_depend_neither_on_workers_nor_on_where_the_loader_begins(samples: Any) -> None:
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    try:
        alone, shared, late = loaded(samples, 0), loaded(samples, 3), loaded(samples, 1, first=4)
    finally:
        torch.set_num_threads(1)
    assert_same(alone, shared)
    assert_same(alone[4:], late)
    assert torch.equal(state, torch.get_rng_state())
    if type(samples) is Padded:
        assert len({batch["mixed"][1] for batch in alone}) == 8, "each batch is mixed differently"
    if type(samples) is Stacked:
        sums = torch.cat([batch["sum"] for batch in alone])
        assert len(set(sums.tolist())) == 20, "each epoch is augmented differently"


def test_seeds_of_samples_are_derived_like_every_other() -> None:
    derive = derive_seeds("sample", 7, 3)
    assert [derive(index) for index in (0, 5, 123)] == [
        derive_seed("sample", 7, 3, index) for index in (0, 5, 123)
    ]


class Slow(Stacked):
    """Samples that tell which process made them; that of `at` does what it is told."""

    def __init__(self, at: int = -1, act: Callable[[], Any] = os.getpid) -> None:
        super().__init__()
        self.at, self.act = at, act

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        if index == self.at:
            self.act()
        return os.getpid()


def test_the_workers_share_the_work_on_one_stacked_batch(tmp_path: Path) -> None:
    class Waiting(Slow):
        def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
            (tmp_path / str(os.getpid())).touch()
            give_up_at = time.monotonic() + HUNG_SECONDS
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < give_up_at:
                time.sleep(0.01)
            return os.getpid()

    whole = [MicroBatch(number=0, epoch=0, ids=range(10))]
    loader = Loader(Waiting(), 7, whole, num_workers=2, device=CPU)
    pids = set(loader.next().tolist())
    loader.close()
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_batch_stays_as_it_is_as_long_as_anything_refers_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_loader, "_BATCHES_IN_USE", 8)  # more than that are kept here
    ids = [MicroBatch(number=0, epoch=epoch, ids=range(4)) for epoch in range(40)]
    for samples in (Stacked(), Padded()):
        maker = Maker(samples, 7)
        weight = torch.ones((), requires_grad=True)
        loader = Loader(samples, 7, ids, num_workers=1, device=CPU)
        kept, arrays, products = [], [], []
        for number, micro in enumerate(ids):
            batch = loader.next()
            assert_same(batch, maker.batch(micro))
            if number % 2:
                kept.append((micro, batch))
            elif isinstance(samples, Padded):
                arrays.append((micro, batch["array"][1:], batch["padded"].numpy()))
            else:
                products.append((micro, weight * batch["x"][0]))
            del batch
        loader.close()
        for micro, batch in kept:
            assert_same(batch, maker.batch(micro))
        for micro, rows, values in arrays:
            assert np.array_equal(rows, maker.batch(micro)["array"][1:])
            assert np.array_equal(values, maker.batch(micro)["padded"].numpy())
        for micro, product in products:  # autograd keeps what it was computed from
            weight.grad = None
            product.sum().backward()
            assert weight.grad is not None
            assert weight.grad.item() == maker.batch(micro)["x"][0].sum().item()


def test_an_empty_part_of_a_large_tensor_takes_no_memory() -> None:
    table = torch.zeros(250_000, 4)
    memory = torch.zeros(4096, dtype=torch.uint8).numpy()
    places = write({"boxes": [table[7:7], table[:1]]}, memory, 0)
    assert_same(read(memory.data, places), {"boxes": [table[7:7], table[:1]]})


@pytest.mark.parametrize("samples", [Stacked(), Padded()], ids=["stacked", "own collate"])
def test_memory_is_used_again_as_soon_as_nothing_refers_to_it(samples: Any) -> None:
    ids = [MicroBatch(number=0, epoch=epoch, ids=range(4)) for epoch in range(60)]
    loader = Loader(samples, 7, ids, num_workers=1, device=CPU)
    places = set()
    for _ in ids:
        batch = loader.next()
        first = batch["x"][0] if "x" in batch else batch["padded"]
        places.add(first.data_ptr() // 2**20)  # it stands behind a pickle, whose length varies
        del batch
    loader.close()
    assert len(places) <= 4, "two ahead, one in use, one that was just given back"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_samples_time_and_count_comes_with_their_batch(num_workers: int) -> None:
    class Timed(Stacked):
        def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
            with Tally.timed("read"):
                time.sleep(0.002)
            if index == 4:
                Tally.count("replaced")
            return super().get(index, epoch, rng)

    Tally.count("replaced", 100)  # before the loader, so no sample's
    loader = Loader(Timed(), 7, MICRO_BATCHES, num_workers=num_workers, device=CPU)
    replaced = []
    for _ in MICRO_BATCHES:
        loader.next()
        replaced.append(loader.tally.counts.get("replaced", 0))
    loader.close()
    assert replaced == [0, 1, 1, 1, 1, 2, 2, 2], "with the batch of sample 4, in each epoch"
    assert set(loader.tally.seconds) == {"read", "make"}
    assert loader.tally.seconds["read"] >= 20 * 0.002
    assert loader.tally.seconds["make"] > 0


def test_workers_ignore_what_is_meant_for_the_trainer() -> None:
    interruption = Interruption(budget_seconds=120)
    interruption.listen()
    try:
        loader = Loader(Slow(), 7, MICRO_BATCHES, num_workers=1, device=CPU)
        worker = int(loader.next()[0])
        # `timeout`, Ctrl-C and others send their signal to the whole process group.
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
            os.kill(worker, number)
        assert len([loader.next() for _ in MICRO_BATCHES[1:]]) == 7
        assert not interruption.wait(0.2), "a worker's signal is no notice to the trainer"
        loader.close()
    finally:
        interruption.close()
    assert not is_alive(worker)


@pytest.mark.parametrize("samples", [Stacked, Padded], ids=["stacked", "own collate"])
def test_fails_in_a_sentence_when_a_worker_is_killed(
    samples: type[Stacked], capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(samples):  # type: ignore[misc, valid-type]
        def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
            if index == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().get(index, epoch, rng)

    loader = Loader(Killed(), 7, MICRO_BATCHES, num_workers=2, device=CPU)

    def act() -> int:
        return len([loader.next() for _ in MICRO_BATCHES])

    assert exit_code_of(act) == Exit.FAILED
    loader.close()
    said = capsys.readouterr().err
    assert re.match(r"error: loader worker \d+ was killed by SIGKILL, perhaps because", said)


class OfItsOwnError(Exception):
    """Cannot be unpickled: it takes more than one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Numbered(Exception):
    """Cannot be unpickled: it takes a number, and keeps a sentence."""

    def __init__(self, number: int) -> None:
        super().__init__(f"sample {int(number)} is torn")


@dataclass(frozen=True)
class Frozen(Exception):
    """Takes no notes."""

    number: int


def refuse() -> None:
    raise UserError("image 7 is damaged; remove it")


def look_up() -> None:
    {}["x"]


def raise_its_own() -> None:
    raise OfItsOwnError(1, 2)


def raise_its_number() -> None:
    raise Numbered(7)


def raise_frozen() -> None:
    raise Frozen(7)


@pytest.mark.parametrize(
    ("act", "kind", "says"),
    [
        (refuse, UserError, "^image 7 is"),
        (look_up, KeyError, "x"),
        (raise_its_own, RuntimeError, "1 and 2"),
        (raise_its_number, RuntimeError, "sample 7 is torn"),
        (raise_frozen, RuntimeError, "Frozen: 7"),
    ],
)
def test_an_error_of_the_workload_is_raised_at_its_batch_with_its_traceback(
    act: Callable[[], Any], kind: type[Exception], says: str
) -> None:
    loader = Loader(Slow(7, act), 7, MICRO_BATCHES, num_workers=2, device=CPU)
    for _ in range(2):
        loader.next()
    with pytest.raises(kind, match=says) as error:
        loader.next()
    assert multiprocessing.active_children() == [], "although nobody has closed it"
    loader.close()
    told = str(error.value) + "".join(getattr(error.value, "__notes__", []))
    assert f"in {act.__name__}" in told


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fails_to_stack_samples_of_different_shapes(num_workers: int) -> None:
    class Growing(Stacked):
        def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
            return torch.zeros(1 + (index > 6), 2)

    loader = Loader(Growing(), 7, MICRO_BATCHES, num_workers=num_workers, device=CPU)
    with pytest.raises(UserError, match=r"is float32\[1, 2\], another float32\[2, 2\]; let `get`"):
        for _ in MICRO_BATCHES:
            loader.next()
    loader.close()


def test_closing_waits_for_no_worker() -> None:
    loader = Loader(Slow(3, lambda: time.sleep(600)), 7, MICRO_BATCHES, num_workers=2, device=CPU)
    pids = {int(pid) for pid in loader.next()}
    loader.close()
    assert not any(is_alive(pid) for pid in pids)


def test_a_trainer_that_exits_without_closing_its_loader_ends_its_workers() -> None:
    kept = []
    trainer = multiprocessing.get_context("fork").Process(
        target=lambda: kept.append(Loader(Slow(), 7, MICRO_BATCHES, num_workers=2, device=CPU))
    )
    trainer.start()
    trainer.join(30)
    hangs = trainer.is_alive()
    trainer.kill()
    assert not hangs
    assert trainer.exitcode == 0


def test_workers_end_when_the_trainer_is_killed() -> None:
    def act() -> list[int]:
        loader = Loader(Slow(), 7, MICRO_BATCHES, num_workers=2, device=CPU)
        assert loader._workers is not None
        return [process.pid or 0 for process in loader._workers._processes]

    pids = in_fork(act)  # it exits without closing its loader
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.parametrize(
    ("wanted", "device", "num_threads", "num_ranks", "expected"),
    [
        (3, "cpu", 4, 1, 3),
        ("auto", "cpu", 2, 1, 6),
        ("auto", "cpu", 8, 1, 0),  # they would only take turns with the trainer
        ("auto", "cuda", 4, 1, 7),
        ("auto", "cuda", 4, 4, 1),
    ],
)
def test_as_many_workers_as_the_vcpus_leave_beside_the_training(
    wanted: LoaderWorkers,
    device: str,
    num_threads: int,
    num_ranks: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    found = num_workers(
        wanted, device=torch.device(device), num_threads=num_threads, num_ranks=num_ranks
    )
    assert found == expected


def test_an_interrupted_run_with_workers_equals_the_whole_one_without(
    run: Run, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    interrupt_at("first", 5, signal.SIGTERM)
    assert run.attempt("--override=loader_workers=auto") == Exit.INTERRUPTED
    assert multiprocessing.active_children() == []
    assert run.attempt("--override=loader_workers=1") == 0
    assert_equal(run, whole)
    assert all(0 <= line["data_wait"] <= 1 for line in run.lines("step"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_is_not_overwritten_while_the_gpu_copies_it(num_workers: int) -> None:
    class Large(Stacked):
        def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
            return torch.full((2_000_000,), float(torch.rand((), generator=rng)))

    device = torch.device("cuda", 0)
    ids = [MicroBatch(number=0, epoch=epoch, ids=range(4)) for epoch in range(40)]
    maker = Maker(Large(), 7)
    loader = Loader(Large(), 7, ids, num_workers=num_workers, device=device)
    busy = torch.ones(8192, 8192, device=device)
    for first in range(0, 40, 10):
        for _ in range(30):
            busy = busy @ busy / 8192  # so that the copies below wait for their turn
        on_gpu = []
        for _ in range(10):
            batch = loader.next()
            assert batch.is_pinned()
            on_gpu.append(batch.to(device, non_blocking=True))
            del batch
        for micro, copied in zip(ids[first : first + 10], on_gpu, strict=True):
            assert torch.equal(copied.cpu(), maker.batch(micro))
    loader.close()
    gc.collect()

"""The cost of a step on ranks that add up in our own order, alternating with DDP's in one run."""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.session import Session
from contract.trainer_options import RANKS
from training import Loss, Settings, Train, parallel
from training.durable import RankEnvironment, World

# Four million weights a layer, and enough rows per rank that computing takes most of a step.
_WIDTH, _ROWS = 2048, 64
_ROUNDS, _WARM = 5, 1


class _Layers(Train):
    """A stage whose loss is the sum of squares of the model's outputs."""

    name = "layers"

    settings = Settings(steps=1, global_batch=8 * _ROWS, micro_batch=_ROWS)

    def loss(self, m: nn.Module, b: Tensor, step: int, num_steps: int) -> Loss:
        return Loss(total=m(b).square().sum())


def ranks(session: Session) -> None:
    """Time forward and backward of 100 M weights on 2, 4 and 8 ranks, up to the number of GPUs.

    On the CPU, four ranks have half as many weights, as they share one machine's memory.
    """
    there = 4 if session.is_dry else torch.cuda.device_count()
    if there < 2:
        session.row("ranks", "skipped", "this machine has one GPU")
    for size in RANKS[1:]:
        if size <= there:
            layers = 48 // size if session.is_dry else 24
            ours, ddp, cpu = _measured(session, size, layers)
            weights = layers * _WIDTH * _WIDTH / 1e6
            name = f"{size} ranks, {weights:.0f} M weights: ours, DDP in s; CPU seconds of DDP's"
            verdict = f"{ours / ddp:.3f} of DDP's time"
            session.row(name, f"{ours:.3f}, {ddp:.3f}; {cpu:.3f}", verdict)


def _measured(session: Session, size: int, layers: int) -> tuple[float, float, float]:
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    meeting = (session.folder / f"meeting-{size}").as_uri()
    arguments = [(rank, size, layers, meeting, session.device.type, found) for rank in range(size)]
    processes = [context.Process(target=_rank, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"a rank exited with {process.exitcode}")
    result: tuple[float, float, float] = found.get()
    return result


def _rank(rank: int, size: int, layers: int, meeting: str, device_type: str, found: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = RankEnvironment(rank=rank, world_size=size, local_rank=rank, rendezvous=meeting)
    world = World(place, device)
    model, peer = (
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers))).to(device)
        for _ in range(2)
    )
    own = parallel(_Layers(), model, world)
    ddp = DistributedDataParallel(peer, gradient_as_bucket_view=True)
    batch = torch.randn(_ROWS, _WIDTH, device=device)

    def ours() -> None:
        own.begin_step(size)
        with own.adding(0):
            own.losses(batch, 0, 1)[0].backward()  # type: ignore[no-untyped-call]
        own.end_step()
        model.zero_grad(set_to_none=True)

    def theirs() -> None:
        ddp(batch).square().sum().backward()
        peer.zero_grad(set_to_none=True)

    times: dict[Callable[[], None], list[tuple[float, float]]] = {ours: [], theirs: []}
    for _ in range(_WARM + _ROUNDS):
        for act, seconds in times.items():
            world.gather(None)  # all ranks begin together
            wall, cpu = time.perf_counter(), time.process_time()
            act()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    walls = [statistics.median(wall for wall, _ in times[act][_WARM:]) for act in (ours, theirs)]
    cpus = [statistics.median(cpu for _, cpu in times[act][_WARM:]) for act in (ours, theirs)]
    if world.leads:
        found.put((walls[0], walls[1], cpus[0] / cpus[1]))
    world.close()
    Path(meeting.removeprefix("file://")).unlink(missing_ok=True)

"""Forked processes that know each other as the ranks of a world."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from training.durable.attempt.world import RankEnvironment, World

CPU = torch.device("cpu")


def on_ranks(size: int, root: Path, act: Callable[[World, Path], None]) -> None:
    """Run `act` in `size` processes that know each other; raise the first error of any of them."""
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    rendezvous = f"file://{root}/rendezvous-{size}-{act.__name__}"

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        place = RankEnvironment(rank=rank, world_size=size, local_rank=rank, rendezvous=rendezvous)
        try:
            world = World(place, CPU)
            act(world, root)
            world.close()
        except BaseException:
            errors.put(f"rank {rank}: {traceback.format_exc()}")
            raise

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()  # no-op unless it hangs
        process.join()
    assert errors.empty(), errors.get()
    assert [process.exitcode for process in processes] == [0] * size

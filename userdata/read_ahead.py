"""Read ahead, with a deep queue, what an earlier machine of this image read to import torch.

A root volume made from a snapshot is loaded from S3 block by block, each when it is first read;
`import torch` reads thousands, one after another. The process that imported it calls `record`.
Run: python3 -m userdata.read_ahead FILE, which `record` wrote; a wrong list does no harm.
"""

import ctypes
import json
import mmap
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The list that an earlier machine of this image left, and the one that this machine leaves.
FOUND, RECORDED = "/run/training/reads.json", "/run/training/reads-new.json"
# What EBS loads at once: the size of a snapshot's blocks (EBS direct APIs, GetSnapshotBlock).
BLOCK_BYTES = 512 * 2**10
# As deep as the queue of an EBS volume; more would only delay the reads of other programs.
NUM_READS = 32


def record(out: Path) -> int:
    """Record which blocks of this process's files are in the page cache; return their number."""
    files: list[tuple[str, int, list[int]]] = []
    for path in dict.fromkeys((*_mapped(), *_modules())):
        if blocks := _resident(path):
            files.append((str(path), path.stat().st_size, blocks))
    unfinished = out.with_name(f"{out.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(files))
    unfinished.rename(out)
    return sum(len(blocks) for _, _, blocks in files)


def read_ahead(recorded: Iterable[tuple[str, int, list[int]]]) -> tuple[int, int]:
    """Have the kernel read the blocks of unchanged files; return the numbers read and requested."""
    blocks = [(path, size, n) for path, size, numbers in recorded for n in numbers]
    left = iter(blocks)  # of all threads: a task for each block would cost as much again
    with ThreadPoolExecutor(NUM_READS) as pool:
        reads = pool.map(lambda _: sum(map(_read_block, left)), range(NUM_READS))
        return sum(reads), len(blocks)


def _modules() -> Iterator[Path]:
    """Yield the files of this process's modules, as Python reads them, in import order."""
    for module in list(sys.modules.values()):
        for name in (getattr(module, "__cached__", None), getattr(module, "__file__", None)):
            if isinstance(name, str) and Path(name).is_file():
                yield Path(name).resolve()
                break


def _mapped() -> Iterator[Path]:
    """Yield the files that this process has mapped: its libraries."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        name = line.partition("/")[2]
        if name and Path("/", name).is_file():
            yield Path("/", name)


def _resident(path: Path) -> list[int]:
    """Return the numbers of a file's blocks that are at least partly in the page cache."""
    size = path.stat().st_size
    if size == 0:
        return []
    with path.open("rb") as file:
        # ctypes can only take the address of a writable mapping; a private one may be writable.
        mapped = mmap.mmap(
            file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    first = ctypes.c_char.from_buffer(mapped)
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.byref(first), ctypes.c_size_t(size), pages)
    del first
    mapped.close()
    if status != 0:
        raise OSError(ctypes.get_errno(), f"mincore: {path}")
    each = BLOCK_BYTES // mmap.PAGESIZE
    # mincore sets the lowest bit of a resident page's byte; the other bits are reserved.
    is_there = [page & 1 for page in pages.raw]
    return [n for n in range(-(-size // BLOCK_BYTES)) if any(is_there[n * each : (n + 1) * each])]


def _read_block(block: tuple[str, int, int]) -> bool:
    path, size, number = block
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return False
        begin, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size)
        # This reads only what is not cached yet, and copies nothing.
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
        return bool(os.pread(descriptor, 1, end - 1))
    except OSError:
        return False
    finally:
        os.close(descriptor)


def main() -> int:
    """Read ahead; delete a list that does not fit this image, so that a new one is recorded."""
    recorded = Path(sys.argv[1])
    if not hasattr(os, "posix_fadvise"):
        print("this system cannot read ahead")
        return 0
    started = time.monotonic()
    try:
        num_read, num_asked = read_ahead(json.loads(recorded.read_text()))
    except (OSError, ValueError, TypeError) as error:
        recorded.unlink(missing_ok=True)
        print(f"{recorded} is not a valid block list ({error}); recording it again")
        return 0
    if num_read < num_asked / 2:
        recorded.unlink()
    seconds = time.monotonic() - started
    print(f"{num_read} of {num_asked} blocks of 512 KiB read ahead in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

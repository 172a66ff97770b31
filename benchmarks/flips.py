"""1,000 flips of one bit at a random place, with either hash: at rest, in flight, in a synced folder."""
import random, tempfile, sys, os, json, hashlib
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[1]))
from training.durable.store import transfer
from training.durable.store.folder import FolderStore
from training.durable.store.dataset import StoredDataset, fetch_missing
from training.durable.store.local_dataset import LocalDataset, no_progress, VerifiedFiles
from training.durable.store.transfer import *
from xxhash import xxh3_128
rng = random.Random(63)
fast = transfer.xxh3_128
class Memory(Contents):
    name = "file"
    def __init__(self, d): self.data = d
    @property
    def size(self): return len(self.data)
    def read(self, a, b, spare): return memoryview(self.data)[a:b]
class Flipping(FolderStore):
    at = None; times = 1
    def read_into(self, key, start, data):
        super().read_into(key, start, data)
        if self.at is not None and start <= self.at // 8 < start + len(data) and self.times:
            self.times -= 1
            data[self.at // 8 - start] ^= 1 << self.at % 8
found = 0; n = 0
data = bytearray(os.urandom(20 * 2**20))
for kind in ("xxh128", "sha256"):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as t:
        store = Flipping(Path(t) / "s")
        digests = None
        # a checkpoint, of several parts
        size = PART_BYTES
        new = [new_hash(data[i:i+size], is_fast=kind == "xxh128").digest() for i in range(0, len(data), size)]
        store.put("x/file", bytes(data))
        sums = {"sha256": "", "xxh128": checksum_of(new)} if kind == "xxh128" else {"sha256": checksum_of(new)}
        entry = FileEntry(name="file", bytes=len(data), part_bytes=size, **sums)
        assert receive(store, "x/file", entry, lambda a, d: None)
        path = Path(t) / "s/x/file"
        for _ in range(150):  # at rest
            bit = rng.randrange(len(data) * 8)
            with path.open("r+b") as f:
                f.seek(bit // 8); b = f.read(1)[0]; f.seek(bit // 8); f.write(bytes([b ^ 1 << bit % 8]))
            n += 1; found += not receive(store, "x/file", entry, lambda a, d: None)
            with path.open("r+b") as f: f.seek(bit // 8); f.write(bytes([b]))
        for _ in range(100):  # in flight
            store.at, store.times = rng.randrange(len(data) * 8), 1
            n += 1; found += not receive(store, "x/file", entry, lambda a, d: None)
        store.at = None
        assert receive(store, "x/file", entry, lambda a, d: None)
        # a dataset of 5 files, synced
        files = []
        for i in range(5):
            body = os.urandom(rng.randrange(1, 9 * 2**20)); store.put(f"{i}.bin", body)
            files.append({"name": f"{i}.bin", "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest(), **({"xxh128": xxh3_128(body).hexdigest()} if kind == "xxh128" else {})})
        if kind == "sha256": transfer.xxh3_128 = None
        for k in range(100):  # in flight: fetched again, whole
            out = Path(t) / f"o{k}"; out.mkdir()
            one = rng.choice(files); store.at, store.times = rng.randrange(one["bytes"] * 8), 1
            before = store.times
            fetch_missing(store, [one], out, no_progress)
            n += 1; found += store.times == 0 and (out / one["name"]).read_bytes() == Path(t, "s", one["name"]).read_bytes()
        store.at = None
        out = Path(t) / "synced"; out.mkdir(); fetch_missing(store, files, out, no_progress)
        for k in range(150):  # in the synced folder
            one = rng.choice(files); p = out / one["name"]; bit = rng.randrange(one["bytes"] * 8)
            b = bytearray(p.read_bytes()); b[bit // 8] ^= 1 << bit % 8; p.write_bytes(b)
            again = fetch_missing(store, files, out, no_progress)
            n += 1; found += [e["name"] for e in again] == [one["name"]] and p.read_bytes() == Path(t, "s", one["name"]).read_bytes()
        transfer.xxh3_128 = fast
    print(kind, n, "flips,", found, "found", flush=True)

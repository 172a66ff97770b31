#!/usr/bin/env bash
# webdataset 1.0.2: with detshuffle=True and DataLoader workers, every epoch has the same order of
# shards, and a detshuffle() of samples the same order of samples: the number of the epoch is
# counted in the dataset's copy in each worker, and new workers begin with a new copy. Without
# workers the orders differ, and so do those of the ordinary shuffle.
# Seen: 5 epochs: without workers 5 orders, with 2 workers 1; ordinary shuffle 5 and 5.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet torch==2.15.0 \
  webdataset==1.0.2 numpy==2.4.6
cd "$folder"
cat >epochs.py <<'PY'
import sys

import webdataset as wds
from torch.utils.data import DataLoader


def number(sample):
    return int(sample["txt"])


def orders(deterministic, workers):
    shards = [f"{n:02}.tar" for n in range(16)]
    data = wds.WebDataset(shards, shardshuffle=16, detshuffle=deterministic, seed=1)
    shuffle = wds.detshuffle(50, seed=2) if deterministic else wds.shuffle(50)
    loader = DataLoader(data.compose(shuffle).map(number), batch_size=None, num_workers=workers)
    return len({tuple(loader) for _ in range(5)})


if __name__ == "__main__":
    for n in range(16):
        with wds.TarWriter(f"{n:02}.tar") as shard:
            for key in range(10 * n, 10 * n + 10):
                shard.write({"__key__": f"{key:04}", "txt": str(key)})
    seen = {}
    for deterministic in (True, False):
        seen[deterministic] = [orders(deterministic, workers) for workers in (0, 2)]
        print(f"detshuffle {deterministic}: different orders of 5 epochs with 0 and 2 workers:",
              *seen[deterministic])
    sys.exit(seen != {True: [5, 1], False: [5, 5]})
PY
venv/bin/python epochs.py 2>/dev/null

"""Packs a folder into a folder or a store, in processes, without what the command imports.

python -m tests.training.workloads.imagenet.pack_alone SOURCE OUT; prints the images packed.
"""

import os
import sys
from pathlib import Path

from contract.keys import MANIFEST
from training.durable.dataset_output import FolderOutput, Output
from training.durable.sources import ImportSource
from training.durable.store.dataset import StoredDataset, StoreOutput
from training.workloads.imagenet import packing
from training.workloads.imagenet.image_dataset import pack_dataset

_IMAGES_EACH = 5


def main(source: Path, out: str, kind: str) -> None:
    """As `data import` does."""
    packing._MIN_SHARDS = -(-len(list((source / "train").rglob("*.jpg"))) // _IMAGES_EACH)
    os.cpu_count = lambda: 2
    output: Output = FolderOutput(Path(out)) if kind == "folder" else StoreOutput(uri=out)
    if output.read(MANIFEST) is None:
        files = ImportSource(source, source).files()
        made = pack_dataset(files, output, 0, lambda done, total: print(done, flush=True))
        StoredDataset.complete(output, "imagenet", made)
    output.clean_up()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

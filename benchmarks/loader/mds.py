"""A folder's images in mosaicml-streaming's shards: `python -m benchmarks.loader.mds FOLDER`."""

import sys
from pathlib import Path


def main() -> int:
    """Write FOLDER/mds from FOLDER/images/train, as they are."""
    from streaming import MDSWriter

    folder = Path(sys.argv[1])
    columns = {"jpg": "bytes", "cls": "int"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, progress_bar=False) as writer:
        for label, of_class in enumerate(sorted((folder / "images" / "train").iterdir())):
            for path in sorted(of_class.iterdir()):
                writer.write({"jpg": path.read_bytes(), "cls": label})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The part of safetensors that the trainer uses, for a GPU machine without the package.

benchmarks/gpu/table.py and tests/conftest.py add this folder to the path if it is not installed.
"""

import json
from pathlib import Path
from typing import Any

# Names only: in this package, `torch` is the submodule.
from torch import Tensor, frombuffer, uint8

from training.durable import header_bytes, parse_header, tensor_at

SafetensorError = ValueError


class safe_open:
    """A file, which is read entirely."""

    def __init__(self, path: Path | str, framework: str) -> None:
        data = bytearray(Path(path).read_bytes())
        header = data[: header_bytes(bytes(data[:8]), len(data))]
        block = frombuffer(data, dtype=uint8)
        spans = parse_header(bytes(header), len(data)).spans
        self._about = json.loads(header[8:]).get("__metadata__")
        self._tensors = {span.name: tensor_at(block, span).clone() for span in spans}

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(self, *_: object) -> None: ...

    def metadata(self) -> Any:
        """Return the file's metadata."""
        return self._about

    def keys(self) -> list[str]:
        """Return the tensors' names."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        return self._tensors[name]

"""What the trainer uses of safetensors, by its own layout: for a GPU machine without the package.

benchmarks/gpu/table.py and tests/conftest.py put this folder on the path where there is no other.
"""

import json
from pathlib import Path
from typing import Any

# Not torch itself: the submodule of that name takes its place here.
from torch import Tensor, frombuffer, uint8

from training.save.layout import header_bytes, parse_header
from training.save.state import tensor_at

SafetensorError = ValueError


class safe_open:
    """A file, read as a whole."""

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
        """What the file says beside its tensors."""
        return self._about

    def keys(self) -> list[str]:
        """The tensors' names."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """One of them."""
        return self._tensors[name]

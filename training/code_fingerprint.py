"""Fingerprints of source code, so that results of different code are never taken for equal.

Imports no torch.
"""

import hashlib
import sys
from functools import cache
from pathlib import Path

import training


@cache
def code_fingerprint(module: str, *engine: str) -> str:
    """Hash the code of a workload or stage defined in `module`, and what it may use of training/.

    That is its own package or module, and the modules directly in training/: a workload imports
    nothing else. `engine` adds files and folders of training/ that decide about its results.
    """
    digest = hashlib.sha256()
    for path in _sources(module, engine):
        # Not the whole path: another machine may have the same code elsewhere.
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(module: str, engine: tuple[str, ...]) -> list[Path]:
    home = _root(training.__name__)
    top, *below = module.split(".")
    depth = 2 if below[:1] == ["workloads"] else 1
    own = home.joinpath(*below[:depth]) if top == training.__name__ else _root(top)
    used = [source for part in engine for source in _sources_in(home / part)]
    return list(dict.fromkeys([*sorted(home.glob("*.py")), *used, *_sources_in(own)]))


def _sources_in(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _root(module: str) -> Path:
    """The folder of a package (also of one without __init__.py), or the file of a module."""
    spec = sys.modules[module].__spec__
    assert spec is not None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    assert spec.origin is not None
    return Path(spec.origin)

"""torch.compile for a stage's blocks, and the compiled code, kept in the run's store.

A replacement need not compile it again. torch unpickles and runs this code, just as a machine runs
the run's bundle: keep it only in a store that nobody else writes to. torch takes an entry only for
the graph, settings and device that it was made for, so results are the same without it; damaged
code and that of another torch are dropped with a warning.
"""

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from contract.keys import artifact_prefix
from training.artifact_key import key_of
from training.durable.store.protocol import Store, StoreError
from training.engine.parallel import named_blocks
from training.workload import Train

_DIGEST_BYTES = hashlib.sha256().digest_size
# With batches of many shapes each new one compiles: store the code no more often than this.
_LEAST_SECONDS = 60.0
_log = logging.getLogger(__name__)


def compile_blocks(stage: Train, model: nn.Module, mode: str) -> None:
    """Let torch compile each block that the stage names, or the whole model; equals share code."""
    # Not dynamic: whether torch compiles code for all sizes depends on what this process compiled
    # before, so the bits could differ after an interruption. They also could if the ninth size of
    # a batch ran uncompiled, as it does by default.
    from torch._dynamo import config

    config.recompile_limit = config.accumulated_recompile_limit
    for block in named_blocks(stage, model) or [model]:
        # Like block.compile(), but through a function of ours: before torch 2.14 a module of one of
        # torch's own classes, such as nn.Sequential, silently stayed uncompiled.
        block._compiled_call_impl = torch.compile(partial(_call, block), mode=mode, dynamic=False)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


class CompileCache:
    """The compile cache of one stage on the machines of a run that have this numerics key."""

    def __init__(self, store: Store, stage: str, numerics: Mapping[str, Any]) -> None:
        facts = {"compiled": stage, "numerics": dict(numerics), "python": sys.version}
        self._store = store
        self._key = f"{artifact_prefix(key_of(facts))}compiled.bin"
        self._has_more = False  # compiled code than is stored
        self._kept_at: float | None = None
        self._sending: threading.Thread | None = None

    def load(self) -> None:
        """Pass torch the code that an earlier attempt kept, if any."""
        began = time.monotonic()
        try:
            content = self._read()
            found = None if content is None else torch.compiler.load_cache_artifacts(content)
        except Exception as error:  # torch's own too, such as on a full disk
            _log.warning("[compile] cannot use the kept code, compiling again: %s", error)
            return
        if content is None:
            return
        if found is None:
            _log.warning("[compile] compiling again: torch cannot read the kept code")
            return
        count, seconds = sum(map(len, found.artifacts.values())), time.monotonic() - began
        line = "[compile] %d kept parts, %.1f MB, loaded in %.1f s"
        _log.info(line, count, len(content) / 1e6, seconds)

    def stepped(self, *, has_compiled: bool) -> None:
        """After a step, store new code in the background once nothing more compiles."""
        self._has_more = self._has_more or has_compiled
        if has_compiled or not self._has_more:
            return
        is_early = self._kept_at is not None and time.monotonic() - self._kept_at < _LEAST_SECONDS
        if is_early or (self._sending is not None and self._sending.is_alive()):
            return
        self._has_more, self._kept_at = False, time.monotonic()
        made = torch.compiler.save_cache_artifacts()
        if made is not None:
            # A daemon: neither the end of the stage nor that of the attempt waits for it.
            self._sending = threading.Thread(
                target=self._write, args=(made[0],), name="compile-cache", daemon=True
            )
            self._sending.start()

    def _read(self) -> bytes | None:
        stored = self._store.get(self._key)
        if stored is None:
            return None
        digest, content = stored.data[:_DIGEST_BYTES], stored.data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError(f"{self._store.uri}/{self._key} does not match its checksum")
        return content

    def _write(self, content: bytes) -> None:
        try:
            self._store.put(self._key, hashlib.sha256(content).digest() + content)
        except StoreError as error:
            _log.warning("[compile] the compiled code is not kept for replacements: %s", error)

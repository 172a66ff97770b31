"""A workload as the trainer describes it: `python -m training describe`.

Only the trainer imports workloads and torch, so everyone else asks in a separate process.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.source import copy_source

_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadDescription:
    """A workload with a recipe and overrides; `stages` are in order."""

    recipe: str
    stages: Mapping[str, int | None]  # name -> its steps or shards, where they are known
    num_samples: int  # in the dataset that the recipe is made for; 0: unknown
    makes_data: bool
    imports_data: bool = True  # into a form of its own; else it may read files as they are
    footprints: Sequence[Mapping[str, Any]] = ()  # of each stage, if requested
    why_unmeasured: str = ""

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))


def describe(
    workload: str,
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    source: Path | None = None,
    manifest: Path | None = None,
    measured: bool = False,
    also: Sequence[Sequence[str]] = (),
) -> WorkloadDescription:
    """Have the trainer import a workload; a refusal is raised as a UserError of one sentence.

    `source` is the folder of a user's workload; the trainer sees only what travels to a machine.
    With a dataset's `manifest`, a recipe that does not fit it is refused. `measured` adds
    footprints, which takes seconds. `also` are more overrides to check: each call imports torch.
    """
    words = ["describe", workload, "--recipe", recipe]
    words += [word for pair in overrides for word in ("--override", pair)]
    words += ["--manifest", str(manifest.resolve())] if manifest is not None else []
    words += ["--measure"] if measured else []
    with tempfile.TemporaryDirectory(prefix="source-") as folder:
        if source is not None:
            copy_source(source, Path(folder))
            words += ["--source", folder]
        if also:
            others = Path(folder, "also.json")
            others.write_text(json.dumps(also), encoding="utf-8")
            words += ["--also", str(others)]
        command = [sys.executable, "-m", "training", *words]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(_refusal(workload, last, source))
    # Lines before the last are what the workload's own modules print.
    return WorkloadDescription(**json.loads(done.stdout.strip().splitlines()[-1]))


def _refusal(workload: str, message: str, source: Path | None) -> str:
    """Return the trainer's own sentence, or the last line of a traceback of the workload's code."""
    if message.startswith("error: "):
        return message.removeprefix("error: ")
    advice = "correct it"
    if source is not None and message.startswith("ModuleNotFoundError"):
        advice = f"add it to {source}, or to its requirements.txt and also install it here"
    return f"workload {workload!r} cannot be imported: {message}; {advice}"

"""`runs download` and `open`: fetch weights, checkpoints and the report; replace no file."""

import tempfile
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.keys import FINAL_FILES, RECEIPT, REPORT
from operate.control import carry_out, say
from operate.runs import OperatedRun
from training import main as training
from training.durable import Store, write_report


def download(run: OperatedRun, folder: Path | None, checkpoint: str | None) -> dict[str, Any]:
    """Fetch a run's weights with report and receipt, or a checkpoint as `export` writes it."""
    out = folder or Path(run.id)
    opened = run.opened()
    # Listed after the head was read: once that says finished, every file is there.
    sizes = run.store.sizes("") if checkpoint is None else {}
    keys = [key for key in sizes if key.startswith(FINAL_FILES) or key in (RECEIPT, REPORT)]
    has_files = any(key.startswith(FINAL_FILES) for key in keys)
    if has_files and opened.head.state != "finished":
        raise UserError(
            f"{run.id} has not finished: what lies below {run.uri}/{FINAL_FILES} may be of an "
            "attempt that failed, or not yet complete; --checkpoint newest gets its last commit"
        )
    if checkpoint is None and not has_files:
        lacks = "has no weights yet"
        if opened.is_of_program and opened.head.state == "finished":
            lacks = "left no model in SM_MODEL_DIR, so its model is in its last snapshot"
        raise UserError(
            f"{run.id} {lacks}; --checkpoint newest gets its last commit, if it has one"
        )
    if checkpoint is not None:
        name = opened.find_checkpoint(checkpoint).name
        keys = [name if opened.is_of_program else f"{name}.safetensors"]
    files = [out / key for key in keys]
    if existing := [str(path) for path in files if path.exists()]:
        raise UserError(f"{existing[0]} already exists and is not replaced; use another --out")
    if checkpoint is not None:
        options = ("--run-uri", run.uri, "--checkpoint", name, "--out", str(files[0]))
        carry_out(training, ["export", *options])
    else:
        _fetch(run.store, {key: sizes[key] for key in keys}, out)
    return {"run": run.id, "done": f"is in {out}", "files": [str(path) for path in files]}


def _fetch(store: Store, sizes: Mapping[str, int], out: Path) -> None:
    """Fetch all or nothing: parts arrive in any order, so half a file may have its full size."""
    try:
        for folder in sorted({out, *((out / each).parent for each in sizes if ".." not in each)}):
            folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".", dir=out)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; use another --out") from error
    with temporary as fetched:
        for number, (key, size) in enumerate(sizes.items()):
            say(f"{out / key}, {size / 1e6:.1f} MB")
            store.get_file(key, Path(fetched, f"{number}"))
        for number, key in enumerate(sizes):
            Path(fetched, f"{number}").replace(out / key)


def open_report(run: OperatedRun, *, in_browser: bool) -> dict[str, Any]:
    """Return the path of the run's up-to-date report and the address of its dashboard."""
    opened = run.opened()
    # Also of a run that has ended: its machine was paid for a little longer.
    write_report(opened.store, opened.record, opened.head)
    page = run.folder / REPORT if run.folder else Path(tempfile.mkdtemp(prefix="runs-"), REPORT)
    if run.folder is None:
        run.store.get_file(REPORT, page)
    if in_browser:
        webbrowser.open(page.as_uri())
    link = run.outputs.get("Dashboard")
    done = f"has its report in {page}" + (f", its dashboard at {link}" if link else "")
    return {"run": run.id, "done": done, "report": str(page), "dashboard": link}

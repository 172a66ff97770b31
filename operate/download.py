"""`runs download` and `open`: fetch weights, checkpoints and the report; replace no file."""

import sys
import tempfile
import webbrowser
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.keys import FINAL_FILES, RECEIPT, REPORT
from operate.runs import OperatedRun
from training import main as training
from training.durable import OpenRun, StoreError, UnfinishedFile, write_report


def download(run: OperatedRun, folder: Path | None, checkpoint: str | None) -> dict[str, Any]:
    """Fetch a run's weights with report and receipt, or a checkpoint as `export` writes it."""
    out = folder or Path(run.id)
    opened = OpenRun.at(run.uri)
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
    files, fetched = [out / key for key in keys], list[UnfinishedFile]()
    if existing := [str(path) for path in files if path.exists()]:
        raise UserError(f"{existing[0]} already exists and is not replaced; use another --out")
    with redirect_stdout(sys.stderr), ExitStack() as unfinished:
        if checkpoint is not None:
            options = ("--run-uri", run.uri, "--checkpoint", name, "--out", str(files[0]))
            if code := training(["export", *options]):
                raise SystemExit(code)
        for key, path in zip(keys, files, strict=True) if checkpoint is None else ():
            # Parts arrive in any order: half a file has its full size.
            try:
                fetched.append(unfinished.enter_context(UnfinishedFile(path)))
            except StoreError as error:
                raise UserError(f"{error}; use another --out") from error
            print(f"{path}, {sizes[key] / 1e6:.1f} MB", flush=True)
            run.store.get_file(key, fetched[-1].path)
        for each in fetched:
            each.place()
    return {"run": run.id, "done": f"is in {out}", "files": [str(path) for path in files]}


def open_report(run: OperatedRun, *, in_browser: bool) -> dict[str, Any]:
    """Return the path of the run's up-to-date report and the address of its dashboard."""
    opened = OpenRun.at(run.uri)
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

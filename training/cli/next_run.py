"""How `data import` and `data check` end: what a dataset's facts say of a run on it.

Overrides that follow, the size and its dollars, and the commands. Imports torch.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.config import fitted, resolve_config
from training.data_report import facts_of
from training.workload import Workload

_ROOT = Path(__file__).parents[2]


def show_next(
    given: str, workload: Workload[Any], manifest: Mapping[str, Any], where: str, uri: str | None
) -> None:
    """Print what follows for the dataset in `where`, for the workload as `given`."""
    meta = manifest["meta"]
    print(f"[data] {facts_of(meta)}")
    small = next(iter(workload.recipes))
    large = "full" if "full" in workload.recipes else small
    for recipe in dict.fromkeys((small, large)):
        found = fitted(workload, resolve_config(workload, recipe, {}), {}, meta)
        named = " ".join(f"{name}={text}" for name, text in found.items())
        print(f"[data] recipe {recipe}, with what the dataset decides: {named or 'nothing else'}")
    is_stored = where.startswith("s3://")
    if not is_stored:
        print("here:")
        run = f"--workload {given} --recipe {small} --dataset-uri {where}"
        print(f"    python -m training run {run} --run-uri runs/first")
    size, figures = _advised(given, large, manifest)
    print(f"on EC2{figures}:")
    name = (uri or where).rstrip("/").rpartition("/")[2]
    if uri is None and not is_stored:
        print(
            f"    python -m training data upload {where} --dataset-uri s3://DATASET-BUCKET/{name}"
        )
    context = f"-c workload={given} -c recipe={large}{size} -c dataset={name}"
    manifest_file = "" if is_stored else f" -c dataset_manifest={where}/manifest.json"
    print(f"    npx cdk deploy TrainingStack {context}{manifest_file}")


def _advised(workload: str, recipe: str, manifest: Mapping[str, Any]) -> tuple[str, str]:
    """The size that sizing takes for it, as context, and its figures; "" where it is unknown.

    Another process: the trainer stands alone, and on a machine sizing is not there.
    """
    with tempfile.TemporaryDirectory(prefix="advise-") as folder:
        path = Path(folder, "manifest.json")
        path.write_text(json.dumps(manifest), encoding="utf-8")
        command = [sys.executable, "-m", "sizing", "advise", workload, "--recipe", recipe]
        command += ["--manifest", str(path), "--json"]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return "", ""
    said = json.loads(done.stdout)
    found = next((each for each in said["candidates"] if each["size"] == said["take"]), None)
    if found is None:
        return "", ""
    hours, spot, demand = (found[n] for n in ("hours_p50", "usd_spot_p50", "usd_on_demand"))
    return f" -c size={said['take']}", (
        f", {said['take']}: {hours:.2g} h, ${spot:.2f} on Spot, ${demand:.2f} on demand "
        "(p50, modelled)"
    )

"""The next steps after making a dataset: a run's overrides, the size and its dollars, commands.

Only commands that would not be refused: each recipe is tried on the manifest as a run does, and the
deploy's parameters by those who check them. Sizing and stacks do so in another process, as the
trainer stands alone and instances do not have them.
"""

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.keys import MANIFEST
from training.durable.store.local_dataset import facts_of
from training.registry import WORKLOADS, fitted, module_of, workable

if TYPE_CHECKING:
    from training.workload import Workload

_ROOT = Path(__file__).parents[2]
# GiB of a data volume unless its size is set, and those that a dataset of 1 GiB needs.
_USUAL_GIB, _VOLUME_PER_DATASET = 200, 1.1


def show_next(
    given: str, workload: "Workload[Any]", manifest: Mapping[str, Any], where: str, uri: str | None
) -> dict[str, Any]:
    """Print what follows for the dataset in `where`, for the workload as `given`; return it."""
    meta, recipes = manifest["meta"], list(workload.recipes)
    print(f"[data] {facts_of(meta)}")
    small, large = recipes[0], "full" if "full" in recipes else recipes[0]
    tried = {recipe: _tried(workload, recipe, meta) for recipe in dict.fromkeys((small, large))}
    here, on_ec2, refused = list[str](), list[str](), "; also: ".join(tried[large]["refused"])
    is_stored = where.startswith("s3://")
    if not is_stored and not tried[small]["refused"]:
        words = ["--workload", given, "--recipe", small]
        words += [w for pair in _pairs(tried[small]) for w in ("--override", pair)]
        words += ["--dataset-uri", where, "--run-uri", "runs/first"]
        here = [f"python -m training run {shlex.join(words)}"]
        print("here:", *here, sep="\n    ")
    if not refused:
        on_ec2, refused = _deploy(given, large, _pairs(tried[large]), manifest, where, uri)
    return {
        "dataset": where,
        "meta": meta,
        "recipes": tried,
        "here": here,
        "on_ec2": on_ec2,
        "on_ec2_refused": refused,
    }


def _tried(workload: "Workload[Any]", recipe: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a recipe takes from the dataset, what else it needs and why it is refused."""
    needed, without, refused = workable(workload, recipe, meta)
    found = fitted(workload, recipe, needed, meta)
    named = " ".join(f"{name}={text}" for name, text in found.items())
    print(f"[data] recipe {recipe}, overrides from the dataset: {named or 'none'}")
    if without:
        named = " ".join(f"{name}={text}" for name, text in needed.items())
        fits = f" ({named} lets it train)" if not refused else ""
        print(f"[warning] recipe {recipe} would be refused: {'; also: '.join(without)}{fits}")
    return {"from_dataset": found, "needed": needed, "refused": refused}


def _pairs(tried: Mapping[str, Any]) -> list[str]:
    return [f"{name}={text}" for name, text in tried["needed"].items()]


def _deploy(
    given: str,
    recipe: str,
    overrides: Sequence[str],
    manifest: Mapping[str, Any],
    where: str,
    uri: str | None,
) -> tuple[list[str], str]:
    """Print and return the commands of an upload and a deploy, or why there are none."""
    context = {"workload": given, "recipe": recipe, "overrides": " ".join(overrides)}
    if given not in WORKLOADS:
        module = module_of(given)
        file = Path(str(sys.modules[module].__file__)).resolve()
        context["source"] = str(file.parents[module.count(".") + (file.stem == "__init__")])
    figures, advised = _advised(given, recipe, overrides, manifest)
    is_stored = (uri or where).startswith("s3://")
    key = (uri or where).removeprefix("s3://").partition("/")[2].strip("/")
    if not is_stored:
        # A folder may have any name, a key prefix may not.
        key = re.sub(r"[^\w.-]+", "-", Path(where).resolve().name, flags=re.ASCII).strip("-._")
        key = key or "dataset"
    context = {name: text for name, text in context.items() if text} | advised | {"dataset": key}
    if refused := _refused(context):
        print(f"[warning] recipe {recipe} would not deploy: {refused}")
        return [], refused
    here = Path.cwd() == _ROOT
    folder = where if here or where.startswith("s3://") else str(Path(where).resolve())
    commands = [] if here else [f"cd {shlex.quote(str(_ROOT))}"]
    if not is_stored:
        store = f"s3://DATASET-BUCKET/{key}"
        commands.append(
            f"python -m training data upload {shlex.quote(folder)} --dataset-uri {store}"
        )
    if not where.startswith("s3://"):
        context["dataset_manifest"] = f"{folder}/{MANIFEST}"
    pairs = " ".join(f"-c {shlex.quote(f'{name}={text}')}" for name, text in context.items())
    commands.append(f"npx cdk deploy TrainingStack {pairs}")
    print(f"on EC2{figures}:", *commands, sep="\n    ")
    return commands, ""


def _advised(
    workload: str, recipe: str, overrides: Sequence[str], manifest: Mapping[str, Any]
) -> tuple[str, dict[str, str]]:
    """Return the figures of the size that sizing picks, and its CDK context; "" if unknown."""
    gib = math.ceil(sum(e["bytes"] for e in manifest["files"]) * _VOLUME_PER_DATASET / 2**30)
    context = {"data_volume.gib": str(gib)} if gib > _USUAL_GIB else {}
    words = [workload, "--recipe", recipe, "--volume-gib", str(max(gib, _USUAL_GIB)), "--json"]
    options = {"global_batch": "--batch", "micro_batch": "--micro-batch"}
    for name, _, text in (pair.partition("=") for pair in overrides):
        words += [options[name], text] if name in options else []
    words += ["--manifest", "/dev/stdin"]
    done = _run("sizing", "advise", *words, given=json.dumps(manifest))
    if done.returncode != 0:
        return "", context
    advice = json.loads(done.stdout)
    found = next((each for each in advice["candidates"] if each["size"] == advice["take"]), None)
    if found is None or found["why_not"]:
        return "", context
    if found["market"] == "on-demand":
        context["on_demand_base"] = "1"
    hours, spot, demand = (found[n] for n in ("hours_p50", "usd_p50", "usd_on_demand"))
    return (
        f", {advice['take']}: {hours:.2g} h, ${spot:.2f} on Spot, ${demand:.2f} on demand "
        "(p50, modelled)",
        {"size": advice["take"], **context},
    )


def _refused(context: Mapping[str, str]) -> str:
    """Return why a deploy would be refused; "" if it would not, or where nothing can say so."""
    if context.get("source") == str(_ROOT):
        return f"the module of {context['workload']} is in {_ROOT}; move it to a folder of its own"
    pairs = [word for name, text in context.items() for word in ("-c", f"{name}={text}")]
    done = _run("stacks.parameters", *pairs)
    # As it says itself what is wrong; anything else is about this environment.
    return done.stderr.strip().removeprefix("parameters: ") if done.returncode == 2 else ""


def _run(module: str, *words: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(
        command, cwd=_ROOT, input=given, capture_output=True, text=True, check=False
    )

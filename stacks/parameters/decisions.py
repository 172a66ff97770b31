"""Parameters that follow from the size, the workload or a manifest: one function each.

Each function is named like its parameter; its docstring is the reason that `python -m
stacks.parameters` prints.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from sizing.catalogue import InstanceType
from stacks.parameters import checks
from stacks.parameters.context import parse_int, parse_text

Values = Mapping[str, object]
BYTES_PER_MIB = 2**20
BYTES_PER_GIB = 2**30


def dataset(_: InstanceType, values: Values) -> object:
    """the workload's name; a program's is its source folder's"""
    if values["program"]:
        return Path(str(values["source"])).resolve().name
    return values["workload"]


def dataset_gib(_: InstanceType, values: Values) -> object:
    """total of the files in dataset_manifest; 0: unknown at synth"""
    path = parse_text("dataset_manifest", values["dataset_manifest"])
    if not path:
        return 0
    try:
        manifest = json.loads(Path(path).read_text(encoding="utf-8"))
        return sum(int(file["bytes"]) for file in manifest["files"]) / BYTES_PER_GIB
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"dataset_manifest is {path!r}, which cannot be read as a manifest ({error}); give the "
            "manifest.json that `python -m training data make` or `upload` wrote, or nothing"
        ) from error


def data_volume_mib_per_second(instance: InstanceType, _: Values) -> object:
    """what the size sustains to EBS, within gp3's limits"""
    sustained = int(instance.ebs_baseline_mb_per_second * 1e6 / BYTES_PER_MIB)
    return min(max(sustained, checks.GP3_MIN_MIB_PER_SECOND), checks.GP3_MAX_MIB_PER_SECOND)


def data_volume_iops(_: InstanceType, values: Values) -> object:
    """what the throughput needs: a dataset is read in large pieces"""
    throughput = parse_int("data_volume_mib_per_second", values["data_volume_mib_per_second"])
    needed = throughput * checks.GP3_IOPS_PER_MIB_PER_SECOND
    return min(max(needed, checks.GP3_MIN_IOPS), checks.GP3_MAX_IOPS)


# In this order: the IOPS follow from the throughput.
DECISIONS: Mapping[str, Callable[[InstanceType, Values], object]] = {
    decide.__name__: decide
    for decide in (dataset, dataset_gib, data_volume_mib_per_second, data_volume_iops)
}

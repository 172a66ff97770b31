"""The names in S3: a run's objects below its prefix, and a dataset's manifest.

The scripts of userdata/ repeat them as literals; a test compares the two.
"""

import re

HEAD = "head.json"  # the lease and the list of committed checkpoints
CONFIG = "config.json"  # written once, authoritative for the run
RECEIPT = "receipt.json"
REPORT = "report.html"
FINAL = "final/model.safetensors"
WAITING = "waiting.json"  # another machine waits for the lease
ADAPTATION = "adaptation.json"  # how the recipe was fitted to the first machine's memory
DATASET_FILES = "dataset-files.gz"  # a plain folder's at the run's start: name and bytes a line
GUARD = "guard.json"  # what the Guard remembers between calls

CHECKPOINTS = "checkpoints/"
METRICS = "metrics/"  # JSON lines, several objects per attempt
EVENTS = "events/"  # one JSON object each
LOGS = "logs/"  # what a program printed, in parts: <generation>-<nonce>-<part>.log.gz
FINAL_FILES = "final/"  # what a program left in model/ and output/data/
BLOBS = "blobs/"  # the contents that a program's snapshots name
BUNDLES = "bundles/"  # a copy of the code that the run began with
EVALUATION = "evaluation/"  # the last evaluation's files, by stage
ARTIFACTS = "artifacts/"  # derived data; also next to runs/, where runs share it

# In the run bucket.
RUNS = "runs/"
SPOT_HISTORY = "spot.json"  # what Spot did to them, by pool (sizing/fallback/pools.py)
SWEEPS = "sweeps/"
BUDGETS = "budgets/"  # what several runs have spent: <name>/<period>.json
# The periods of budgets, and how much of a day's date names one: 2026-11-28, 2026-11, 2026.
PERIODS = {"day": 10, "month": 7, "year": 4}
# Next to the runs of a sweep: what they are, and the jobs that were queued for them.
SWEEP = "sweep.json"
SWEEP_JOBS = "jobs.json"
# The parts of a dataset, as manifests, folders and channels name them.
SPLITS = ("train", "validation", "test")
# In a dataset's prefix.
MANIFEST = "manifest.json"
# A workload that can resume an interrupted import keeps its position in this file of the new
# dataset, as JSON with the key "workload". It is deleted once there is a manifest.
UNFINISHED = ".unfinished.json"
PACKED = ".packed/"  # the records of an unfinished dataset's finished files

# A checkpoint's name is checked: names that are read from a head decide what is deleted.
CHECKPOINT_NAME = re.compile(r"[0-9]{8,}-g(?P<generation>[0-9]{4,})-[0-9a-f]+")

# Like a checkpoint's, a blob's name is never used twice; the generation is that of its writer.
BLOB_NAME = re.compile(r"g(?P<generation>[0-9]{4,})-[0-9a-f]{16}")
_SECOND = ".second"


def checkpoint_prefix(name: str) -> str:
    """Return the prefix of one checkpoint's files."""
    return f"{CHECKPOINTS}{name}/"


def progress_key(machine: str) -> str:
    """Return the key of the progress of one machine's boot (contract/progress.py)."""
    return f"progress/{machine}.json"


def artifact_prefix(key: str) -> str:
    """Return the prefix of one artifact's files."""
    return f"{ARTIFACTS}{key}/"


def blob_key(name: str) -> str:
    """Return the key of one blob."""
    return f"{BLOBS}{name}"


def second_key(name: str) -> str:
    """Return the key of a blob's second copy, which few blobs have."""
    return f"{blob_key(name)}{_SECOND}"


def blob_of(key: str) -> str | None:
    """Return the name of the blob; None unless the key is that of a blob or its second copy."""
    name = key.removeprefix(BLOBS).removesuffix(_SECOND)
    return name if BLOB_NAME.fullmatch(name) else None


def generation_in(name: str) -> int:
    """Return the generation that wrote a checkpoint or blob of this name; 0 for any other name."""
    match = CHECKPOINT_NAME.fullmatch(name) or BLOB_NAME.fullmatch(name)
    return int(match["generation"]) if match else 0

"""The progress of a machine in a boot step: files and bytes; never time, nor what it prints.

The machine keeps it in its own object of the run (contract.keys.progress_key), about once a minute
while it grows; the Guard takes what has grown between its calls for a sign of life.
"""

import json


def progress_record(step: str, files: int, size: int) -> bytes:
    """Return the object's content."""
    return json.dumps({"step": step, "files": files, "bytes": size}).encode()


def read_progress(data: bytes) -> tuple[str, int]:
    """Return the step and the sum of its counts; ValueError if it is no record."""
    match json.loads(data):
        case {"step": str(step), "files": int(files), "bytes": int(size)} if (
            min(files, size) >= 0 and max(files, size) < 2**63 and len(step) <= 100
        ):
            return step, files + size
    raise ValueError(f"the progress is {data[:200]!r}, which names no step with files and bytes")

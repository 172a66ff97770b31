"""The facts in a dataset's own manifest about its samples, in place of the usual ones."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sizing.models.constants import GIB
from sizing.models.data_path import DataFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFacts:
    """A dataset; None or "" if its manifest does not say. Bytes and pixels: means of its images."""

    name: str
    num_bytes: int
    workload: str = ""
    train_samples: int | None = None
    validation_samples: int | None = None
    sample_bytes: float | None = None
    sample_pixels: float | None = None

    @property
    def gib(self) -> float:
        """Its size on the volume."""
        return self.num_bytes / GIB

    def applied(self, facts: DataFacts | None) -> DataFacts | None:
        """Return the workload's usual facts with this dataset's bytes and pixels in them."""
        if facts is None or self.sample_bytes is None:
            return facts
        seconds = facts.loader_cpu_seconds
        if self.sample_pixels is not None:
            more = (self.sample_pixels - facts.usual_pixels) / 1e6
            seconds += more * facts.cpu_seconds_per_megapixel
        return replace(
            facts,
            dataset_bytes_per_sample=self.sample_bytes,
            epoch_bytes_per_sample=self.sample_bytes,
            loader_cpu_seconds=seconds,
            source=f"{self.name}: {self.sample_bytes / 1e3:,.0f} KB an image; else {facts.source}",
        )


def read_manifest(path: Path) -> DatasetFacts:
    """Read a manifest.json; a ValueError says why a file is not one."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        meta: dict[str, Any] = manifest.get("meta", {})
        splits = meta.get("splits", {})
        return DatasetFacts(
            name=str(manifest.get("name", path)),
            num_bytes=sum(int(file["bytes"]) for file in manifest["files"]),
            workload=str(manifest.get("workload", "")),
            train_samples=_count(splits.get("train")),
            validation_samples=_count(splits.get("validation")),
            sample_bytes=meta.get("image_bytes"),
            sample_pixels=meta.get("image_pixels"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a dataset manifest ({error}); use the manifest.json that "
            "`python -m training data import`, `make` or `upload` wrote"
        ) from error


def _count(split: Any) -> int | None:
    """Return the number of samples of a split if the workload counts them."""
    return split if isinstance(split, int) and split > 0 else None

"""The kept counts of the brief's models are what counting gives."""

import json
from pathlib import Path

import pytest

from training.cli.main import main

KEPT = Path(__file__).parents[3] / "benchmarks" / "seeds" / "models.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "batch", "samples"),
    [
        ("benchmarks.anchors.language:phase1", 8, 800),
        ("benchmarks.anchors.detector:dino_padded", 2, 2935),
        ("benchmarks.anchors.detector:queries_300", 2, 2935),
    ],
)
def test_a_model_is_counted_as_it_was_kept(
    target: str, batch: int, samples: int, tmp_path: Path
) -> None:
    out = tmp_path / "counted.json"
    asked = ["--batch", str(batch), "--samples", str(samples), "--precision", "float32"]
    assert main(["count", target, *asked, "--out", str(out)]) == 0
    counted = json.loads(out.read_text())["footprints"]
    kept = [
        row
        for row in json.loads(KEPT.read_text())["footprints"]
        if (row["workload"], row["recipe"]) == (target, "full")
    ]
    assert counted == kept

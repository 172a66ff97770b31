"""Counts the models that the seed documents name, trained as these describe.

Writes benchmarks/seeds/models.json: python -m benchmarks.seeds.models
"""

import subprocess
import sys

FILE = "benchmarks/seeds/models.json"
_LANGUAGE = "benchmarks.anchors.language"
# Target, recipe, precision, batch, samples per epoch (a hundred steps; CubiCasa5K's images).
MODELS = (
    *((f"{_LANGUAGE}:phase{each}", "full", "float32", 8, 800) for each in ("1", "2", "3")),
    (f"{_LANGUAGE}:phase3_literal", "full", "float32", 8, 800),
    *((f"{_LANGUAGE}:phase{each}", "bfloat16", "bfloat16", 8, 800) for each in ("1", "2", "3")),
    ("benchmarks.anchors.detector:dino", "full", "float32", 2, 2935),
    ("benchmarks.anchors.detector:dino_padded", "full", "float32", 2, 2935),
    *(
        (f"benchmarks.anchors.detector:{each}", "full", "float32", 2, 2935)
        for each in ("queries_300", "queries_200", "width_192")
    ),
)


def main() -> int:
    """Count each with the command that counts any user's model."""
    for target, recipe, precision, batch, samples in MODELS:
        options = {
            "--recipe": recipe,
            "--precision": precision,
            "--batch": batch,
            "--samples": samples,
            "--out": FILE,
        }
        words = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, "-m", "training", "count", target, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"[counted] {target} {recipe}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

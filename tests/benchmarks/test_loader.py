"""Every loader gives every image of the same data once; what it takes becomes a row."""

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loader import measure as loader
from benchmarks.loader.contenders import CONTENDERS, Given, epoch
from training.cli.main import main

IMAGES = 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")

    def run(environment: str, module: str, *arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()):
            assert module != "training" or main(arguments) == 0
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_run", run)
        patch.setattr(loader, "_DIFFERENT", 3)
        loader.make_data(folder, IMAGES)
    return folder


@pytest.mark.parametrize("name", ["ours", "DataLoader, our samples", "torchvision, uint8"])
@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
def test_a_loader_gives_every_image_once(name: str, folder: Path) -> None:
    told = epoch(CONTENDERS[name], Given(folder=folder, batch=4, workers=0))
    assert sum(told["sizes"]) == IMAGES
    assert told["arrived"] == sorted(told["arrived"])
    assert told["cpu_seconds"] > 0


def test_the_rate_leaves_out_start_and_end_and_cpu_time_leaves_out_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = [5.0, *(0.1 for _ in range(4)), *(0.25 for _ in range(8)), *(3.0 for _ in range(4))]
    arrived = [sum(waits[: place + 1]) for place in range(len(waits))]
    told = {"arrived": arrived, "sizes": [8] * 17, "cpu_seconds": 0.34}
    monkeypatch.setattr(loader, "_run", lambda *arguments: f"a line\n{loader.json.dumps(told)}\n")
    found = loader._round("ours", Path(), 8, 2)
    assert found is not None
    assert found.rate == pytest.approx(8 / 0.25)
    assert found.cpu_seconds == pytest.approx(2.5)
    limits = {"decoded": 2000.0, "decoded and cropped": 1000.0}
    row = loader._row("ours", [found], limits, cores=2)
    assert row["x limit"] == pytest.approx(0.032)
    assert row["x limit by CPU time"] == pytest.approx(0.8)


def test_a_peer_that_is_not_installed_is_named_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "REPOSITORY", Path("nowhere"))
    assert loader._round("DALI on the CPU", Path(), 8, 2) is None
    row: dict[str, Any] = loader._row("DALI on the CPU", [], {"decoded and cropped": 1.0}, cores=2)
    assert row["images/s"] == "not installed: make peers"


def asked(**given: int) -> argparse.Namespace:
    return argparse.Namespace(**given, workers=1, only=[])


@pytest.mark.parametrize(
    ("rounds", "images", "says"),
    [(0, 1000, "at least one round, got 0"), (1, 639, "at least 640 images, got 639")],
)
def test_fails_a_benchmark_that_could_measure_nothing(rounds: int, images: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loader.measure(asked(rounds=rounds, images=images, batch=64))


@pytest.mark.slow
def test_every_loader_is_measured() -> None:
    rows = loader.measure(asked(rounds=1, images=44, batch=4))
    assert [row["loader"] for row in rows[:-2]] == list(CONTENDERS)
    assert (rows[-2]["x limit"] > 1, rows[-1]["x limit"]) == (True, 1)
    assert all(row["images/s"] == "not installed: make peers" or row["x limit"] > 0 for row in rows)

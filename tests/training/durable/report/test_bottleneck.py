"""What a run was bound by follows from measured figures, which the sentence names."""

from typing import Any

import pytest

from training.engine.step_log import _StageTimes, bottleneck, longest, sentence

# 1,000 samples in 100 s with 3 workers, which had 300 s.
STEADY: dict[str, Any] = {"samples": 1000, "seconds": 100, "loader_seconds": 300}
DECODING = {"read_seconds": 20, "decode_seconds": 200, "make_seconds": 60}


def of(**numbers: float) -> _StageTimes:
    return _StageTimes(**STEADY | numbers)


def alone(**numbers: float) -> _StageTimes:
    return of(loader_seconds=0, **numbers)


@pytest.mark.parametrize(
    ("times", "device", "bound"),
    [
        (of(computed_seconds=97, waited_seconds=1, **DECODING), "cuda", "GPU"),
        (of(computed_seconds=97, waited_seconds=1, **DECODING), "cpu", "CPU"),
        # The trainer waits for most of the time, but the GPU has work nearly all of it.
        (of(computed_seconds=97, waited_seconds=60, **DECODING), "cuda", "GPU"),
        (of(computed_seconds=60, waited_seconds=39, **DECODING), "cuda", "decode"),
        (of(computed_seconds=60, waited_seconds=39, **DECODING), "cpu", "decode"),
        (of(computed_seconds=60, waited_seconds=39, make_seconds=290), "cuda", "make"),
        (of(computed_seconds=60, waited_seconds=39, read_seconds=250, decode_seconds=40),
         "cuda", "disk"),
        (of(computed_seconds=60, waited_seconds=39, sync_seconds=160, decode_seconds=120),
         "cuda", "network"),
        (of(computed_seconds=20, waited_seconds=1, **DECODING), "cuda", "host"),
        # Nobody is at work: batches wait for being handed over.
        (of(computed_seconds=40, waited_seconds=36, make_seconds=30), "cpu", "host"),
        # Without workers a CPU computes and decodes by turns, a GPU decodes while it computes.
        (alone(computed_seconds=49, waited_seconds=50, decode_seconds=50), "cpu", "decode"),
        (alone(computed_seconds=90, waited_seconds=9, decode_seconds=9), "cpu", "CPU"),
        (alone(computed_seconds=90, waited_seconds=99, decode_seconds=99), "cuda", "decode"),
        (alone(computed_seconds=99, waited_seconds=70, decode_seconds=70), "cuda", "GPU"),
    ],
)  # fmt: skip
def test_the_bound_is_what_the_figures_say(times: _StageTimes, device: str, bound: str) -> None:
    assert bottleneck(times, device) == bound


def test_a_run_that_waits_for_decoding_is_told_what_would_change_it() -> None:
    said = sentence("classifier", of(computed_seconds=60, waited_seconds=39, **DECODING), "cuda")
    assert said == (
        "stage 'classifier' is bound by decoding: of its steps' time 60% was computing and "
        "39% waiting for data, at 10 samples/s. 3 loader workers were busy 93% of it (7% reading, "
        "71% decoding, 21% the rest) and could make 11 samples/s. More vCPUs per GPU (another "
        "size) or smaller images (resized when they are packed) would change it."
    )


def test_a_run_whose_gpu_has_work_is_told_that_its_data_could_come_faster() -> None:
    times = of(computed_seconds=98, waited_seconds=1, decode_seconds=30, first_waited_seconds=12)
    said = sentence("classifier", times, "cuda") or ""
    assert "bound by the GPU" in said
    assert "busy 10% of it (100% decoding) and could make 100 samples/s" in said
    assert "It waited 12 s for data before the first steps." in said
    assert "more vCPUs, a faster disk or network would not" in said


def test_a_trainer_that_decodes_itself_is_told_of_workers() -> None:
    times = _StageTimes(
        samples=10, seconds=10, computed_seconds=5, waited_seconds=4, decode_seconds=4
    )
    said = sentence("classifier", times, "cpu") or ""
    assert "The trainer made its batches itself (100% decoding)." in said
    assert "Loader workers (loader_workers=auto) would make batches while" in said


def test_nothing_is_said_of_a_stage_of_one_step() -> None:
    assert sentence("classifier", _StageTimes(first_waited_seconds=3), "cpu") is None
    assert longest({}) is None


def test_the_stage_of_the_run_that_took_the_most_time_counts() -> None:
    stages = {"a": of(seconds=5).to_json(), "b": of(seconds=50).to_json()}
    assert longest(stages) == ("b", of(seconds=50))

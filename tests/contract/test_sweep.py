"""The runs that a sweep draws, and the file in which they stay."""

import pytest

from contract.errors import UserError
from contract.sweep import Sweep, drawn_runs


def test_a_grid_has_every_combination_in_order() -> None:
    runs = drawn_runs(["a=1,2", "b=x,y"], ["c=3"], None, 0)
    assert [run.name for run in runs] == ["a-1_b-x", "a-1_b-y", "a-2_b-x", "a-2_b-y"]
    assert runs[0].overrides == ("c=3", "a=1", "b=x")


def test_a_run_is_one_folder_whatever_its_values_are() -> None:
    (run,) = drawn_runs(["net=timm/resnet18"], [], None, 0)
    assert run.name == "net-timm-resnet18"
    assert run.overrides == ("net=timm/resnet18",)


def test_a_seed_draws_the_same_runs_again_and_no_run_twice() -> None:
    asked = ["rate=0.0001..0.1", "width=8,16"]
    runs = drawn_runs(asked, [], 12, 3)
    assert runs == drawn_runs(asked, [], 12, 3) != drawn_runs(asked, [], 12, 4)
    assert len({run.name for run in runs}) == 12
    rates = sorted(float(run.overrides[0].removeprefix("rate=")) for run in runs)
    assert 0.0001 <= rates[0] < 0.01 < rates[-1] <= 0.1, "spread over the magnitudes"
    assert len(drawn_runs(["a=1,2"], [], 2, 0)) == 2


@pytest.mark.parametrize(
    ("vary", "count", "words"),
    [
        ("a", None, "write name=value,value"),
        ("a=1,,2", None, "write name=value,value"),
        ("a=0.1..1", None, "is a range; add --random N"),
        ("a=0..1", 2, "write two numbers above 0"),
        ("a=1..inf", 2, "write two numbers above 0"),
        ("a=nan..1", 2, "write two numbers above 0"),
        ("a=1,2,1", None, "makes the run a-1 twice; name it once"),
        ("a=1,2", 3, "has only about 2 combinations"),
    ],
)
def test_fails_for_what_cannot_be_drawn(vary: str, count: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        drawn_runs([vary], [], count, 0)


def test_a_sweep_is_read_as_it_was_written() -> None:
    runs = drawn_runs(["a=1,2"], [], None, 0)
    sweep = Sweep(workload="w", recipe="r", drawn="grid", runs=runs)
    assert Sweep.from_bytes(sweep.to_bytes(), "sweep.json") == sweep
    for data in (b"", b"[]", b'{"format": 2}', b'{"format": 1, "runs": [1]}'):
        with pytest.raises(UserError, match="is not a sweep"):
            Sweep.from_bytes(data, "sweep.json")

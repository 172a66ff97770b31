"""What a stage shows at its end is made with the evaluated weights, once, and is in the report."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training import tiny
from tests.training.hooks import kill_at
from tests.training.outspoken import WORKLOAD
from tests.training.runs import AVERAGED, DOUBLE, SHARDED, Run, assert_equal

SHORT = [WORKLOAD, "--override=epochs=1"]


def shown(run: Run) -> dict[str, str]:
    store, found = run.store, {}
    for key in store.sizes("evaluation/"):
        if key.endswith((".csv", ".txt", ".md")):
            data = store.get(key)
            assert data is not None
            found[key.removeprefix("evaluation/")] = data.data.decode()
    return found


def test_it_is_made_with_the_evaluated_weights_and_is_the_same_after_a_kill(
    run: Run, finished: Callable[..., Run]
) -> None:
    whole, run.options = finished(*SHORT, *AVERAGED), [*SHORT, *AVERAGED]
    assert not [*whole.scratch.glob("*/evaluation/rank-0/*")], "the disk keeps none"
    files = shown(whole)
    names = ("answers.csv", "drawn.txt", "weights.md")
    assert files.keys() == {f"{stage}-4/{name}" for stage in ("first", "second") for name in names}
    assert files["second-4/weights.md"] == whole.head.weights_sha256, "the average"
    assert files["first-4/drawn.txt"] != files["second-4/drawn.txt"]
    kill_at(run, "second-show", 0)
    assert not any(name.startswith("second") for name in shown(run))
    assert run.attempt() == 0
    assert_equal(run, whole)
    assert shown(run) == files
    # The report has texts and tables.
    text = (Path(whole.uri) / "report.html").read_text()
    number = files["second-4/drawn.txt"].strip("<>\n")
    assert f"<p>second-4/drawn.txt</p><pre>&lt;{number}&gt;\n</pre>" in text
    answer = files["second-4/answers.csv"].splitlines()[1].partition(",")[0]
    row = f"<tr><td>{answer}</td><td>a, b</td></tr>"
    assert f"<tr><th>answer</th><th>from</th></tr>{row}</table>" in text


@pytest.mark.parametrize(
    ("more", "ranks"), [([], {0}), pytest.param([SHARDED], {0, 1}, marks=pytest.mark.slow)]
)
def test_ranks_act_together_only_where_they_share_the_model(
    run: Run, tmp_path: Path, more: list[str], ranks: set[int]
) -> None:
    run.options = [*SHORT, *DOUBLE, *more]
    tiny.HOOKS["second-show"] = lambda rank: (tmp_path / f"by-{rank}").touch()
    assert run.attempt_with_ranks(2) == [0, 0]
    assert {path.name for path in tmp_path.glob("by-*")} == {f"by-{rank}" for rank in ranks}
    assert len(shown(run)) == 4

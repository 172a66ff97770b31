"""A sweep's report: the page of a run, over all runs of a sweep, whatever their state."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import botocore.session
import pytest

from contract.sweep import Sweep, drawn_runs
from tests.training.runs import AVERAGED, WORKLOAD, Run
from training.cli.main import main
from training.durable.record.head import Head
from training.durable.report.page import SweptRuns
from training.durable.store.folder import open_store


@pytest.fixture(scope="module")
def sweep(finished: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three runs the first has finished, the second was cut off, the third never began."""
    folder = tmp_path_factory.mktemp("sweep")
    runs = drawn_runs(["learning_rate=0.01,0.02,0.03"], ["epochs=3"], None, 0)
    written = Sweep(workload=WORKLOAD, recipe="quick", drawn="grid", runs=runs)
    (folder / "sweep.json").write_bytes(written.to_bytes())
    for run in runs[:2]:
        shutil.copytree(finished(*AVERAGED).uri, folder / run.name)
    head = folder / runs[1].name / "head.json"
    head.write_text(json.dumps(json.loads(head.read_text()) | {"state": "released"}))
    return folder


def test_the_table_has_settings_results_and_dollars(sweep: Path) -> None:
    found = SweptRuns.at(str(sweep))
    assert found is not None
    found = replace(found, usd={"learning_rate-0.01": 1.5, "learning_rate-0.02": 0.25})
    rows = [one.row() for one in found.runs]
    assert [row["state"] for row in rows] == ["finished", "interrupted", "not started"]
    best = max(each["metrics"]["accuracy"] for each in found.runs[0].evaluations)
    assert (rows[0]["metric"], rows[0]["value"]) == ("accuracy", best)  # what best_metric names
    assert rows[2]["value"] is None and rows[2]["step"] == 0
    assert found.write_report() == "1 of 3 runs have finished, for $1.75 so far."
    page = (sweep / "report.html").read_text()
    # What differs between the runs has a column, what all have none.
    assert "<th>learning_rate</th><th>state</th>" in page and "<th>epochs</th>" not in page
    assert "<td>0.02</td><td>interrupted</td>" in page and "<td>1.50</td>" in page
    for name in ("learning_rate-0.01", "learning_rate-0.02"):
        assert page.count(f'"name": "{name}"') >= 2  # in the losses' chart and the metrics'


def test_report_of_a_sweep_writes_its_page(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert main(["report", f"--run-uri={sweep}", f"--out={out}", "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)
    assert first["run"] == "learning_rate-0.01"
    assert "1 of 3 runs have finished." in out.read_text()
    assert "<th>dollars</th>" not in out.read_text()  # nobody knows them here


def test_what_is_no_sweep_is_none(tmp_path: Path) -> None:
    assert SweptRuns.at(str(tmp_path)) is None


def test_the_runs_of_a_sweep_share_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had 13 MB and 9 descriptors of its own: of 500 runs the hundredth had none left."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    runs = drawn_runs(["learning_rate=1,2,3,4"], [], None, 0)
    written = Sweep(workload=WORKLOAD, recipe="quick", drawn="grid", runs=runs)
    found = SweptRuns(sweep=written, store=open_store("s3://bucket/sweeps/one"))
    monkeypatch.setattr(botocore.session, "Session", None)
    monkeypatch.setattr(Head, "read", lambda store: None)
    assert [one.store.uri for one in found.runs] == [f"{found.store.uri}/{r.name}" for r in runs]

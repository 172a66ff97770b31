"""plan, of a run too, advise and accuracy as people type them, on the footprints that ship."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sizing.__main__ import main
from sizing.catalogue.refresh import Refreshed, save


def test_advice_has_the_spot_verdict_the_budget_and_the_ways(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["advise", "trajectory", "--runs", "4", "--hours-per-week", "5", "--sizes", "g5"]
    assert main([*asked, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["spot_suits"] in ("yes", "with care", "no")
    assert advice["usd_of_interruption"] > 0
    assert [way["way"] for way in advice["ways"]] == [
        "one after the other",
        "side by side",
        "a GPU each",
    ]
    now = advice["budget"][0]
    # The list price is $1.212 an hour; 52 weeks a year.
    assert (now["size"], now["usd_week"], now["usd_year"]) == ("g5.2xlarge", 6.06, 315)
    assert (now["usd_month"], now["usd_year_more"]) == (26.26, 0)
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "dollars at 5 hours a week" in shown
    assert "Spot suits this on g5.2xlarge" in shown


def test_advice_explained_has_the_whole_plan_of_each_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["advise", "trajectory", "--sizes", "g5.xlarge,g6.xlarge", "--explain"]
    assert main([*asked, "--json"]) == 0
    plans = [each["plan"] for each in json.loads(capsys.readouterr().out)["candidates"]]
    assert {plan["size"] for plan in plans} == {"g5.xlarge", "g6.xlarge"}
    assert all(plan["epoch_seconds"] > 0 and plan["fits"] for plan in plans)
    assert main(asked) == 0
    assert "notice s" in capsys.readouterr().out


def test_advice_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "trajectory"]) == 0
    shown = capsys.readouterr().out
    assert "g4dn.xlarge, in Compute Optimizer's words: GPUMemoryOverprovisioned" in shown
    assert "no published run on NVIDIA T4, NVIDIA L4" in shown
    assert len(shown.splitlines()) <= 35


def test_an_advice_on_an_old_price_begins_with_what_the_newest_known_one_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def begins(day: str = "", size: str = "g4dn.xlarge") -> str:
        answer = {"value": {"use1-az1": 0.02}, "at": f"{day}T00:00"}
        save(Refreshed(spot={size: answer} if day else {}))
        assert main(["advise", "trajectory", "--sizes", "g4dn.xlarge,g5.xlarge"]) == 0
        return capsys.readouterr().out.splitlines()[0]

    today = datetime.now(UTC).date()
    assert begins().startswith("OLD PRICE: g4dn.xlarge's is ")
    assert "more: g5.xlarge on Spot wins" in begins()
    # AWS's answer of years ago, which the catalogue's price has overtaken.
    assert "by the newest known, $0.2158 of 2026-07-01, it costs $0.03" in begins("2024-01-01")
    old = begins("2024-01-01", "g5.xlarge")
    assert "by the newest known, $0.4507 of 2026-07-01, g4dn.xlarge on Spot wins" in old
    assert "OLD PRICE" not in begins(today.isoformat())


def test_what_needs_an_own_image_is_advised_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "imagenet", "--gpus", "1", "--market", "spot"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "g7e.8xlarge" in shown
    assert "needs an image of your own" in shown


def test_facts_that_go_stale_name_their_day_their_source_and_their_renewal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["catalogue", "--facts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["facts"]
    assert {"list price", "snapshot", "image families"} <= {row["fact"] for row in rows}
    assert all(row["day"] and row["source"] and row["renewed by"] for row in rows)
    assert any("OLD" in row["age"] for row in rows)


def test_a_buyers_limits_are_answered_without_what_fires_on_the_size_in_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["advise", "imagenet", "--deadline-hours", "24", "--market", "spot"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "triggers that fire" not in shown
    assert len(shown.splitlines()) <= 35
    # One line a range, though chances, GPUs and dollars on demand stand beside it.
    assert re.search(r"^ p4de.24xlarge +4 of 8 +[\d.]+ to [\d.]+ +[\d.]+ to [\d.]+ ", shown, re.M)
    main([*asked, "--given", "parallel_jobs=4"])
    assert "triggers that fire on g5.2xlarge" in capsys.readouterr().out


def test_advice_explained_says_of_each_size_what_sets_it_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--runs", "4", "--sizes", "g5.xlarge,g5.2xlarge"]
    assert main(["advise", "trajectory", *given, "--explain"]) == 0
    shown = capsys.readouterr().out.splitlines()
    (row,) = [line for line in shown if line.startswith("g5.xlarge, in Compute Optimizer's words")]
    assert "EBSThroughputUnderprovisioned" in row


def test_a_pipe_that_closes_is_no_failure() -> None:
    command = [sys.executable, "-m", "sizing", "catalogue", "--families"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_a_plan_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "trajectory", "--size", "g5.2xlarge"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 33
    assert main(["plan", "trajectory", "--size", "g5.2xlarge", "--explain"]) == 0
    assert "from memory" in capsys.readouterr().out.removeprefix(short)


def test_every_trainable_size_is_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "trajectory", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    rows = advice["candidates"]
    bought = [(each["size"], each["gpus"], each["market"]) for each in rows]
    assert len(bought) == len(set(bought))
    assert len({size for size, _, _ in bought}) > 30
    assert ("g5.48xlarge", 1, "on-demand") in bought
    dollars = [each["usd_p50"] for each in rows if each["usd_p50"] is not None]
    assert dollars == sorted(dollars)
    assert advice["take"] == rows[0]["size"]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        # A step has four micro-batches of 256.
        ([], {1, 2, 4}),
        (["--micro-batch", "128"], {1, 2, 4, 8}),
        (["--hosts", "2"], {1, 2}),
    ],
)
def test_no_more_gpus_are_advised_than_a_step_has_micro_batches_for(
    options: list[str], counts: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "imagenet", "--sizes", "g5", *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["candidates"]
    assert {row["gpus"] for row in rows} == counts
    assert all(row["usd_p50"] for row in rows)


def test_review_shows_a_run_and_asks_for_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = {"run_id": "r", "workload": "trajectory", "recipe": "full", "seconds": 3600}
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    assert main(["plan", "--run", str(tmp_path)]) == 2
    assert "add --size" in capsys.readouterr().err
    assert main(["plan", "--run", str(tmp_path), "--size", "g5.xlarge", "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["hours from the first attempt"]["actual"] == 1
    # The plan beside it takes the options that any plan takes.
    dear = ["plan", "--run", str(tmp_path), "--size", "g5.xlarge", "--usd-per-hour", "4", "--json"]
    assert main(dear) == 0
    dollars = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert dollars["dollars (Spot)"]["predicted"] > 2 * rows["dollars (Spot)"]["predicted"]
    assert main([*dear[:-1], "--explain"]) == 0
    assert "GPU memory of stage" in capsys.readouterr().out


def test_advice_is_a_page_to_keep_with_date_verdict_chart_and_horizons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["advise", "imagenet", "--sizes", "g5.2xlarge", "--markdown", "--growth", "20"]
    assert main(asked) == 0
    page = capsys.readouterr().out
    today = datetime.now(UTC).date().isoformat()
    assert page.startswith(f"# imagenet: which size\n\n{today}, `python -m sizing")
    assert "use g5.2xlarge on Spot: $" in page.split("```")[0]
    assert "xychart-beta" in page.split("```")[1]
    assert "\n## candidates, cheapest first" in page
    # 1,281,167 x 1.2^3 images of 110 kB, with a tenth beside them, need more than 200 GiB.
    assert re.search(r"in 3 months \| 2,213,857 \| 26\d \| use g5.2xlarge on Spot: ", page)
    # Nothing but one blank line between paragraphs.
    assert "\n\n\n" not in page


def test_what_to_use_now_is_the_advice_itself(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["--recipe", "magvit_full", "--sizes", "g5.2xlarge"]
    assert main(["advise", "trajectory", *recipe, "--markdown", "--growth", "20"]) == 0
    page = capsys.readouterr().out
    says = re.search(r"^use g5.2xlarge on Spot: .+$", page, re.MULTILINE)
    assert says and f"| now | 8,000 | 200 | {says[0]} |" in page

"""The seed documents: every number is a claim with a row, computed again, or says why not."""

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.seeds.figures import FACTS_FILE, fact
from benchmarks.seeds.model_figures import resnet50_hours
from benchmarks.seeds.tables import CLAIMS_FILE, SEEDS, Claim, claims
from sizing import catalogue
from sizing.plan.plan import make_plan
from sizing.plan.request import Request
from tests.benchmarks.seeds import seed_text

ALL = [claim for seed in SEEDS for claim in claims(seed)]
USERS = (CLAIMS_FILE, FACTS_FILE.with_name("model_figures.py"), Path(__file__))
Rows = list[tuple[str, Iterable[int], str]]


def find(seed: str, what: str) -> Claim:
    return next(c for c in ALL if (c.seed, c.what) == (seed, what))


def gpu_gb(size: str) -> float:
    """The GPU's memory as EC2 reports it, in GB."""
    return catalogue.find(size).gpu_memory_mib * 2**20 / 1e9


def claimed() -> Rows:
    return [(claim.seed, claim.lines, claim.written) for claim in ALL]


def set_up() -> Rows:
    return [
        (row["seed"], [int(line) for line in row["lines"].split()], row["written"])
        for row in seed_text.settings()
    ]


def test_every_number_of_the_documents_is_a_claim_or_says_why_it_is_none() -> None:
    assert seed_text.uncovered(seed_text.read_listing(), [*claimed(), *set_up()]) == []
    assert all(row["reason"] for row in seed_text.settings())


def test_a_claim_that_is_missing_is_found() -> None:
    without = [row for row in claimed() if "24.20" not in row[2]]
    missing = seed_text.uncovered(seed_text.read_listing(), [*without, *set_up()])
    assert ("000", 234, "24.20") in missing


def test_no_row_claims_what_its_lines_do_not_say() -> None:
    there = seed_text.read_listing()
    for seed, lines, written in claimed():
        numbers = seed_text.numbers_in(written)
        for line in lines if numbers else ():
            assert set(numbers) & set(there.get((seed, line), ())), (seed, line, written)


@pytest.mark.skipif(not seed_text.SEEDS_FOLDER.is_dir(), reason="the documents are not here")
def test_the_kept_numbers_are_those_of_the_documents() -> None:
    assert seed_text.read_documents() == seed_text.read_listing()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_claim_is_reproduced_or_says_why_not(seed: str) -> None:
    found = claims(seed)
    assert len(found) >= 9
    holds = {"reproduced", "adds up"}
    assert [c.what for c in found if c.verdict not in holds and not c.why] == []
    assert {c.verdict for c in found} <= {*holds, "corrected", "cannot be known"}


def test_arithmetic_on_the_documents_own_figures_is_not_called_reproduced() -> None:
    assert find("000", "with Adam's states").verdict == "adds up"
    assert find("000", "g5.2xlarge: price").verdict == "reproduced"


def test_fewer_queries_save_almost_nothing_and_a_narrower_model_some() -> None:
    queries, width = (
        float(str(find("003", f"{what} if memory runs out").ours).split()[1])
        for what in ("queries", "width")
    )
    assert 0 < queries < 1 < 5 < width < 12


def test_gradients_are_as_large_as_what_is_trained() -> None:
    gradients, parameters = (
        find("000", what).ours for what in ("gradients and temporaries", "the transformer")
    )
    assert gradients == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize(
    ("seed", "what", "ours"),
    [
        ("000", "a clip", 1.572864),
        ("000", "p4d.24xlarge: price", 21.957642),
        ("000", "g5.2xlarge: a month of 4 weeks", 24.24),
        ("000", "g5.12xlarge: more a month", 89.20),
        ("001", "phase 2: parameters, exactly", 371.640312),
        ("001", "phase 3: parameters, exactly", 1479.876792),
        ("001", "phase 3: active parameters, exactly", 549.178296),
        ("001", "phase 3: width", 1664),
        ("003", "ml.g5.2xlarge: GPUs", 1),
        ("003", "model", 0.188),
    ],
)
def test_known_figures_are_computed(seed: str, what: str, ours: float) -> None:
    assert find(seed, what).ours == pytest.approx(ours, rel=0.002)


def test_a_step_of_phase_1_is_near_the_published_run() -> None:
    # 119 M parameters took 0.1464 s a step on an A10G; these are 100 M.
    step = find("001", "phase 1: a step").ours
    assert isinstance(step, float)
    assert step * 119.36 / 100.04 == pytest.approx(0.1464, rel=0.3)


def test_phase_3_does_not_fit_the_gpu_that_was_recommended() -> None:
    need, there = find("001", "phase 3: in all").ours, find("001", "GPU memory").ours
    assert isinstance(need, float)
    assert isinstance(there, float)
    assert need > there * 1.073741824


def test_the_growth_recipe_fits_it_and_the_reasons_have_its_figures() -> None:
    """The figures in braces are computed; nothing in braces is left."""
    why = find("001", "phase 3: in all").why
    need = float(why.split(" needs ")[1])
    assert need < gpu_gb("g5.2xlarge")
    assert not any("{" in claim.why for claim in ALL)
    shorter = float(find("001", "all phases: minutes").why.split(" takes ")[1])
    longer = find("001", "all phases: 100 steps").ours
    assert isinstance(longer, float)
    assert shorter < longer


def test_the_detector_needs_what_its_author_reports() -> None:
    need = find("003", "in all").ours
    assert isinstance(need, float)
    assert need == pytest.approx(fact("dino_reported_gb"), rel=0.15)


def test_the_detector_s_hours_are_those_of_its_plan_and_hold_a_published_run() -> None:
    ours = Request(workload="detection", recipe="full", size="g5.2xlarge")
    assert find("003", "50 epochs").ours == make_plan(ours).work.seconds / 3600
    one = Request(workload="detection", recipe="coco_12", size="p4d.24xlarge")
    work = make_plan(one).work
    published = 12 * 118_287 / fact("detr_images_per_second")
    assert work.seconds_low < published < work.seconds_high


def test_every_published_fact_has_a_use_and_a_source() -> None:
    used = " ".join(row for file in USERS for row in file.read_text().splitlines())
    with FACTS_FILE.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            assert row["source"]
            # SageMaker's prices are used by the name of the size.
            assert row["name"] in used, row["name"]


def test_five_digits_are_meant_exactly() -> None:
    assert find("001", "phase 3: parameters").verdict == "reproduced"
    assert find("001", "phase 3: parameters, exactly").verdict == "corrected"


def test_cost_levels_are_those_of_the_document() -> None:
    levels = [c for c in claims("004") if c.table == "cost level"]
    assert [c.verdict for c in levels] == ["reproduced"] * 5


def test_resnet50_takes_days_where_the_seed_says_weeks() -> None:
    # facts: 41 to 44 GPU hours on an A10G, 29 h on a V100 as NVIDIA published it.
    assert 36 <= resnet50_hours("g5.2xlarge") <= 48
    assert 22 <= resnet50_hours("p3.2xlarge") <= 30
    assert resnet50_hours("g5.xlarge") > resnet50_hours("g5.2xlarge")


def test_fails_on_a_document_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="known: 000, 001, 002, 003, 004"):
        claims("007")

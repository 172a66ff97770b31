"""Answers of AWS: asked question by question, kept with their dates, and never taken for newer."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from sizing.__main__ import main
from sizing.catalogue import refresh as asked
from sizing.catalogue.prices import age_note
from sizing.catalogue.refresh import PriceBook, Refreshed, load, refresh, save

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SIZES = ["g5.xlarge", "g5.2xlarge", "g5.4xlarge"]


class StubbedSession:
    """Clients that answer what the test queued, in the shapes that botocore knows."""

    def __init__(self) -> None:
        self.clients: dict[str, Any] = {}
        self.stubs: dict[str, Stubber] = {}
        for service in ("pricing", "ec2", "service-quotas"):
            client = boto3.client(
                service, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
            )
            self.clients[service], self.stubs[service] = client, Stubber(client)
            self.stubs[service].activate()

    def client(self, service: str, region_name: str) -> Any:
        return self.clients[service]


def product(usd: str) -> str:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": usd}}
    return json.dumps({"terms": {"OnDemand": {"a": {"priceDimensions": {"b": dimension}}}}})


@pytest.fixture
def session() -> StubbedSession:
    session = StubbedSession()
    for usd in ("1.1", "1.3", "1.7"):
        # AWS also lists what costs nothing, such as reserved capacity.
        answer = {"PriceList": [product("0.0000000000"), product(usd)]}
        session.stubs["pricing"].add_response("get_products", answer)
    ec2 = session.stubs["ec2"]
    newer, older = NOW - timedelta(hours=1), NOW - timedelta(hours=9)
    history = [
        ("g5.xlarge", "a", "0.50", newer), ("g5.xlarge", "a", "0.90", older),
        ("g5.xlarge", "b", "0.60", older),
    ]  # fmt: skip
    zones = {"a": "use1-az4", "b": "use1-az6"}
    entries = [
        {
            "InstanceType": size, "SpotPrice": usd, "Timestamp": at,
            "AvailabilityZone": f"us-east-1{zone}", "AvailabilityZoneId": zones[zone],
        }
        for size, zone, usd, at in history
    ]  # fmt: skip
    ec2.add_response("describe_spot_price_history", {"SpotPriceHistory": entries}, ANY_HISTORY)
    scores = [{"Region": "us-east-1", "AvailabilityZoneId": "use1-az1", "Score": 3}]
    ec2.add_response("get_spot_placement_scores", {"SpotPlacementScores": scores})
    return session


ANY_HISTORY = {"InstanceTypes": SIZES, "ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY}


def ask(session: Any, earlier: Refreshed | None = None) -> Refreshed:
    return refresh(SIZES, session=session, region="us-east-1", earlier=earlier, now=NOW)


def test_answers_are_kept_with_their_date(session: StubbedSession) -> None:
    quota = {"Quota": {"Value": 64.0}}
    session.stubs["service-quotas"].add_response(
        "get_service_quota", quota, {"ServiceCode": "ec2", "QuotaCode": "L-3819A6DF"}
    )
    save(ask(session))
    answers = load()
    assert answers is not None
    assert answers.problems == []
    assert answers.quotas["L-3819A6DF"] == {"value": 64.0, "at": NOW.isoformat()}
    assert answers.scores["use1-az1"]["value"]["score"] == 3
    on_demand, spot = PriceBook(answers=answers).find("g5.xlarge")
    assert on_demand and spot
    assert (on_demand.usd_per_hour, on_demand.basis) == (1.1, "refreshed")
    # The newest of each zone, and of the zones the dearest.
    assert (spot.usd_per_hour, spot.basis) == (0.6, "refreshed")
    assert "asked 2026-11-21T12:00 UTC" in spot.source
    # A zone is named by its id, as in the catalogue; of one size only are there answers.
    in_zone = PriceBook(answers=answers, zone="use1-az4")
    for size, usd in (("g5.xlarge", 0.5), ("g5.2xlarge", None)):
        of_zone = in_zone.find(size)[1]
        assert of_zone and (usd is None or of_zone.usd_per_hour == usd)
    # Nothing was said about the Spot price of this one: the catalogue's, which says so.
    assert PriceBook(answers=answers).find("g5.2xlarge")[1] == PriceBook().find("g5.2xlarge")[1]


def test_what_an_account_may_not_ask_is_said_and_the_rest_is_kept(session: StubbedSession) -> None:
    session.stubs["service-quotas"].add_client_error("get_service_quota", "AccessDeniedException")
    answers = ask(session)
    assert len(answers.on_demand) == 3
    assert answers.quotas == {}
    assert len(answers.problems) == 1
    assert answers.problems[0].startswith("quotas: An error occurred (AccessDeniedException)")


def test_earlier_answers_about_other_sizes_stay_with_their_own_date(
    session: StubbedSession,
) -> None:
    before = {"value": 0.7, "at": (NOW - timedelta(days=30)).isoformat()}
    session.stubs["service-quotas"].add_client_error("get_service_quota", "Throttling")
    answers = ask(session, Refreshed(on_demand={"g6.xlarge": before}))
    assert answers.on_demand["g6.xlarge"] == before
    assert "refreshed 30 days old" in age_note(
        PriceBook(answers=answers).find("g6.xlarge"), NOW.date()
    )
    assert "WARNING" not in age_note([PriceBook(answers=answers).find("g5.xlarge")[1]], NOW.date())


def test_the_command_uses_the_cache_and_says_how_old_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = {"value": 9.99, "at": "2026-01-01T00:00:00+00:00"}
    save(Refreshed(on_demand={"g5.xlarge": old}))
    assert main(["catalogue", "--family", "g5"]) == 0
    shown = capsys.readouterr().out
    assert "9.99" in shown
    assert "(2026-01-01)" in shown
    assert "WARNING: old; python -m sizing catalogue --refresh" in " ".join(shown.split())
    assert main(["catalogue", "g5.xlarge", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["sizes"][0]
    assert figures["on_demand_basis"] == "refreshed"
    assert figures["on_demand_source"].endswith("us-east-1, asked 2026-01-01T00:00 UTC")


def test_a_plan_takes_what_aws_answered(capsys: pytest.CaptureFixture[str]) -> None:
    at = "2026-11-20T00:00:00+00:00"
    kept = Refreshed(
        on_demand={"g5.xlarge": {"value": 10.06, "at": at}},
        spot={"g5.xlarge": {"value": {"use1-az1": 1.0, "use1-az2": 2.0}, "at": at}},
    )
    asked_for = ["plan", "trajectory", "--size", "g5.xlarge", "--json"]
    plans = []
    for answers in (Refreshed(), kept):
        save(answers)
        assert main(asked_for) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[1]["usd_on_demand"] == pytest.approx(10 * plans[0]["usd_on_demand"])


def test_each_region_has_its_own_answers(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"value": 0.01, "at": "2026-11-20T00:00:00+00:00"}
    save(Refreshed(on_demand={"g5.xlarge": answer}))
    save(Refreshed(region="eu-west-1", on_demand={"g5.xlarge": answer | {"value": 0.02}}))
    asked_for = ["advise", "imagenet", "--sizes", "g5.xlarge", "--market", "on-demand"]
    assert main([*asked_for, "--region", "any", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["candidates"]
    found = {row["region"]: row["usd_p50"] / row["hours_p50"] for row in rows}
    assert found["us-east-1"] == pytest.approx(0.01, rel=0.01)
    assert found["eu-west-1"] == pytest.approx(0.02, rel=0.01)
    assert len(found) > 5 and all(usd > 0.9 for usd in sorted(found.values())[2:])


def test_fails_when_aws_answers_nothing() -> None:
    refusing = StubbedSession()
    for service, call in (
        ("pricing", "get_products"),
        ("ec2", "describe_spot_price_history"),
        ("ec2", "get_spot_placement_scores"),
        ("service-quotas", "get_service_quota"),
    ):
        refusing.stubs[service].add_client_error(call, "AccessDenied")
    with pytest.raises(ValueError, match="AWS answered nothing: list prices: An error occurred"):
        ask(refusing)


def test_fails_on_a_cache_that_is_something_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = asked.cache_file()
    cache.parent.mkdir()
    for text in ("[1]", "{", '{"on_demand": {"g5.xlarge": 3}}', '{"other": 1}'):
        cache.write_text(text)
        assert main(["catalogue", "g5.xlarge"]) == 2
        assert "is not a cache of this command" in capsys.readouterr().err

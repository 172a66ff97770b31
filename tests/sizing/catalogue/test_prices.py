"""Prices by region and zone, how old they are, and what is refused."""

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from sizing import catalogue
from sizing.__main__ import main
from sizing.catalogue.prices import import_skypilot, read, snapshot, write
from sizing.catalogue.refresh import PriceBook

HEAD = "InstanceType,AcceleratorName,Price,SpotPrice,Region,AvailabilityZone\n"


def test_a_size_that_was_not_seen_in_a_region_costs_what_its_family_does_there() -> None:
    on_demand = catalogue.hourly_price("g5.16xlarge", "eu-west-1")
    assert on_demand.basis == "modelled"
    assert on_demand.usd_per_hour == pytest.approx(4.096 * 1.123 / 1.006, rel=0.001)
    # g6 was not seen there: nobody knows what it costs there.
    assert PriceBook(region="eu-west-1").find("g6.xlarge") == (None, None)


def test_a_spot_price_that_was_not_seen_has_the_highest_share_of_its_family() -> None:
    there = "eu-west-1"
    shares = [
        max(offer.spot_usd_per_hour.values()) / offer.on_demand_usd_per_hour
        for (size, region), offer in snapshot().offers.items()
        if region == there and size.startswith("g5.") and offer.spot_usd_per_hour
    ]
    assert min(shares) < max(shares)
    listed = catalogue.hourly_price("g5.16xlarge", there).usd_per_hour
    modelled = catalogue.spot_price("g5.16xlarge", there)
    assert modelled.basis == "modelled"
    assert modelled.usd_per_hour == pytest.approx(listed * max(shares), abs=1e-3)


def test_every_price_of_the_snapshot_is_possible() -> None:
    seen = snapshot()
    assert len(seen.regions) == 23
    for (size, region), offer in seen.offers.items():
        catalogue.find(size)
        for zone, usd in offer.spot_usd_per_hour.items():
            assert 0 < usd <= offer.on_demand_usd_per_hour * 1.0001, (size, region, zone)


def test_skypilots_file_is_read_without_local_zones_and_other_sizes(tmp_path: Path) -> None:
    given = tmp_path / "vms.csv"
    given.write_text(
        HEAD + "g5.xlarge,A10G,1.006,0.45,us-west-2,usw2-az1\n"
        "g5.xlarge,A10G,1.006,,us-west-2,usw2-az2\n"
        "g5.xlarge,A10G,1.006,0.01,us-west-2,usw2-lax1-az1\n"
        "c1.medium,,0.13,0.04,us-west-2,usw2-az1\n"
    )
    found = import_skypilot(given, day=date(2026, 11, 1), source="theirs")
    write(found, tmp_path / "ours.csv")
    again = read(tmp_path / "ours.csv")
    assert again == found
    (offer,) = again.offers.values()
    assert offer.spot_usd_per_hour == {"usw2-az1": 0.45}


@pytest.mark.parametrize(
    "command",
    [
        ["catalogue", "--family", "g5"],
        ["catalogue", "g5.xlarge"],
        ["plan", "trajectory", "--size", "g5.xlarge"],
        ["advise", "trajectory", "--sizes", "g5.xlarge"],
        ["select", "--phase", "train"],
    ],
    ids=" ".join,
)
def test_every_table_says_how_old_its_prices_are(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Prices: list price" in said
    assert "days old (2026-07-01)" in said


def test_a_plan_takes_region_zone_and_own_price(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "trajectory", "--size", "g5.xlarge", "--region", "us-west-2", "--explain"]

    def usd(*more: str) -> str:
        assert main([*asked, *more]) == 0
        said = capsys.readouterr().out
        return next(line for line in said.splitlines() if line.strip().startswith("spot "))

    assert "0.5134 $/h" in usd()
    assert "0.4829 $/h" in usd("--zone", "usw2-az3")
    assert "0.2 $/h" in usd("--usd-per-hour", "0.2")
    assert "0.3 $/h" in usd("--usd-per-hour", "g5.xlarge=0.3", "--usd-per-hour", "g6.xlarge=9")


def test_fails_to_import_what_is_not_skypilots_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "other.csv"
    given.write_text("a,b\n1,2\n")
    assert main(["catalogue", "--import-snapshot", str(given)]) == 2
    assert "needs --date" in capsys.readouterr().err
    assert main(["catalogue", "--import-snapshot", str(given), "--date", "2026-11-01"]) == 2
    assert "is not SkyPilot's vms.csv: it has no column" in capsys.readouterr().err
    assert main(["catalogue", "--import-snapshot", str(given), "--date", "today"]) == 2
    assert "--date takes a day such as" in capsys.readouterr().err


def test_only_what_a_region_sells_is_advised_there(capsys: pytest.CaptureFixture[str]) -> None:
    # The snapshot has no g6 in eu-west-1.
    assert main(["advise", "trajectory", "--region", "eu-west-1", "--json"]) == 0
    advised = {each["size"] for each in json.loads(capsys.readouterr().out)["candidates"]}
    assert {size.split(".")[0] for size in advised} == {"g4dn", "g5", "p4d"}
    # A size asked for by name is not passed over in silence.
    asked = ["advise", "trajectory", "--region", "eu-west-1", "--sizes", "g5.xlarge,g6.xlarge"]
    assert main(asked) == 2
    assert "'g6.xlarge' has no eu-west-1 on-demand price" in capsys.readouterr().err


def test_a_snapshot_is_imported_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sizing.cli.catalogue_command.SNAPSHOT_FILE", tmp_path / "ours.csv")
    given = tmp_path / "vms.csv"
    given.write_text(HEAD + "g5.xlarge,A10G,1.006,0.45,us-west-2,usw2-az1\n")
    assert main(["catalogue", "--import-snapshot", str(given), "--date", "2026-11-01"]) == 0
    said = capsys.readouterr().out
    assert "1 sizes in 1 regions" in said
    assert "no price in it: g4dn.xlarge, " in said
    assert "g5.xlarge" not in said
    assert read(tmp_path / "ours.csv").day == date(2026, 11, 1)


@pytest.fixture
def imports_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that an import writes, and every price is then read from."""
    ours = tmp_path / "ours.csv"
    kept = (snapshot, catalogue.hourly_price, catalogue.spot_price)
    for module in ("sizing.cli.catalogue_command", "sizing.catalogue.prices"):
        monkeypatch.setattr(f"{module}.SNAPSHOT_FILE", ours)
    for each in kept:
        each.cache_clear()
    yield ours
    for each in kept:
        each.cache_clear()


@pytest.mark.usefixtures("imports_into")
def test_an_import_prices_every_size_of_the_catalogue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dollars on demand: a size's place in the file, from 1; on Spot a quarter or a half of it."""
    sizes, given = list(catalogue.instances()), tmp_path / "vms.csv"
    zones = [
        ("us-east-1", "use1-az1", 4),
        ("us-east-1", "use1-az2", 2),
        ("sa-east-1", "sae1-az1", 4),
    ]
    given.write_text(
        HEAD
        + "".join(
            f"{size},,{usd},{usd / share},{region},{zone}\n"
            for usd, size in enumerate(sizes, start=1)
            for region, zone, share in zones
        )
    )
    assert main(["catalogue", "--import-snapshot", str(given), "--date", "2026-11-24"]) == 0
    assert capsys.readouterr().out.startswith(f"{len(sizes)} sizes in 2 regions -> ")
    for region, share in (("us-east-1", 2), ("sa-east-1", 4)):
        assert main(["catalogue", "--region", region, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["sizes"]
        assert [each["size"] for each in found] == sizes
        for usd, each in enumerate(found, start=1):
            assert each["on_demand_usd_per_hour"] == usd
            assert each["spot_usd_per_hour"] == usd / share
            assert (each["on_demand_basis"], each["spot_basis"]) == ("list price", "snapshot")
            assert each["on_demand_day"] == each["spot_day"] == "2026-11-24"


def test_a_list_price_that_is_newer_than_the_snapshot_stays() -> None:
    assert snapshot().day < date(2026, 7, 20) == catalogue.hourly_price("g5.xlarge").day

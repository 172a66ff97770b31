"""checkov's findings beside our reasons: a new finding fails, and so does a stale reason."""

from typing import Any

import pytest

from stacks.checkov.__main__ import ASSEMBLIES, main
from stacks.checkov.findings import (
    ACKNOWLEDGED,
    FailedCheck,
    find_faults,
    read_acknowledged,
    read_report,
)

PLAIN = FailedCheck(check="CKV_AWS_21", resource="DatasetBucket", assembly="default")
ENTRY = """
[[acknowledged]]
check = "CKV_AWS_21"
what = "S3 versioning"
resources = ["DatasetBucket"]
assemblies = ["default"]
reason = "It can be uploaded again."
"""


def report(*failed: tuple[str, str], unread: tuple[str, ...] = ()) -> dict[str, Any]:
    """What checkov prints of a folder, as far as it is read."""
    checks = [{"check_id": check, "resource": resource} for check, resource in failed]
    return {
        "summary": {"failed": len(failed), "parsing_errors": len(unread)},
        "results": {"failed_checks": checks, "parsing_errors": list(unread)},
    }


def test_a_finding_names_check_resource_and_assembly() -> None:
    found = read_report("default", report(("CKV_AWS_21", "AWS::S3::Bucket.DatasetBucket9BE8B15B")))
    assert found == {PLAIN}


def test_all_frameworks_of_a_report_are_read() -> None:
    parts = [report(("CKV_AWS_21", "AWS::S3::Bucket.DatasetBucket9BE8B15B")), report()]
    assert read_report("default", parts) == {PLAIN}


def test_what_is_acknowledged_is_no_fault() -> None:
    assert find_faults({PLAIN}, read_acknowledged(ENTRY, ["default"])) == []


def test_fails_for_a_new_finding_and_for_a_reason_without_one() -> None:
    (new,) = find_faults({PLAIN}, {})
    assert new.startswith("CKV_AWS_21 of DatasetBucket in assembly default is new: fix it")
    (stale,) = find_faults(set(), read_acknowledged(ENTRY, ["default"]))
    assert stale.startswith("CKV_AWS_21 of DatasetBucket in assembly default is no longer found")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (ENTRY + ENTRY, "is acknowledged twice"),
        (ENTRY.replace("It can be uploaded again.", " "), "an acknowledgment needs assemblies, ch"),
        (ENTRY.replace("what =", "why ="), "an acknowledgment needs"),
        (
            ENTRY.replace("default", "kmz"),
            "CKV_AWS_21 names kmz, which is not one of our assemblies",
        ),
    ],
    ids=["twice", "no reason", "unknown key", "unknown assembly"],
)
def test_fails_for_an_acknowledgment_that_says_nothing(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_acknowledged(text, ["default"])


def test_fails_for_templates_that_checkov_did_not_read() -> None:
    with pytest.raises(ValueError, match=r"could not read \['a.json'\] of default"):
        read_report("default", report(unread=("a.json",)))
    # What it prints where it found no template at all.
    with pytest.raises(ValueError, match="looked at no resource of assembly default"):
        read_report("default", {"passed": 0, "failed": 0, "resource_count": 0})


def test_our_acknowledgments_can_be_read() -> None:
    reasons = read_acknowledged(ACKNOWLEDGED.read_text(encoding="utf-8"), list(ASSEMBLIES))
    assert {each.assembly for each in reasons} == set(ASSEMBLIES)
    assert all(reason.endswith(".") for reason in reasons.values())


def test_fails_without_checkov(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stacks.checkov.__main__.CHECKOV", ACKNOWLEDGED.with_name("none"))
    assert main([]) == 2
    assert "checkov is not installed; run make checkov" in capsys.readouterr().err

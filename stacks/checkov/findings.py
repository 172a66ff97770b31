"""checkov's findings and our acknowledgments of them: both ways complete, or there is a fault."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACKNOWLEDGED = Path(__file__).with_name("acknowledged.toml")
_KEYS = {"check", "what", "resources", "assemblies", "reason"}
# CDK ends a logical id with a hash of its path.
_HASH = re.compile(r"[0-9A-F]{8}$")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class FailedCheck:
    """One check that one resource of one assembly fails, e.g. CKV_AWS_21, DatasetBucket, kms."""

    check: str
    resource: str
    assembly: str


def read_report(assembly: str, report: Any) -> set[FailedCheck]:
    """Return the findings in checkov's JSON; a template that it could not read is a ValueError."""
    found = set()
    for part in report if isinstance(report, list) else [report]:
        if "summary" not in part:
            raise ValueError(f"checkov looked at no resource of assembly {assembly}: {part}")
        if part["summary"]["parsing_errors"]:
            raise ValueError(
                f"checkov could not read {part['results']['parsing_errors']} of {assembly}"
            )
        found |= {
            FailedCheck(check=each["check_id"], resource=_name(each["resource"]), assembly=assembly)
            for each in part["results"]["failed_checks"]
        }
    return found


def _name(resource: str) -> str:
    """Turn AWS::S3::Bucket.DatasetBucket9BE8B15B into DatasetBucket."""
    return _HASH.sub("", resource.rpartition(".")[2])


def read_acknowledged(text: str, assemblies: Sequence[str]) -> dict[FailedCheck, str]:
    """Return each acknowledged finding with its reason; `assemblies` are those that exist."""
    reasons: dict[FailedCheck, str] = {}
    for entry in tomllib.loads(text).get("acknowledged", []):
        for finding, reason in _acknowledged(entry, assemblies):
            if finding in reasons:
                raise ValueError(f"{_spell(finding)} is acknowledged twice")
            reasons[finding] = reason
    return reasons


def _acknowledged(
    entry: Mapping[str, Any], assemblies: Sequence[str]
) -> Iterator[tuple[FailedCheck, str]]:
    if set(entry) != _KEYS or not str(entry["reason"]).strip():
        raise ValueError(f"an acknowledgment needs {', '.join(sorted(_KEYS))}; got {dict(entry)}")
    unknown = set(entry["assemblies"]) - set(assemblies)
    if unknown:
        raise ValueError(
            f"{entry['check']} names {', '.join(sorted(unknown))}, "
            "which is not one of our assemblies"
        )
    for resource in entry["resources"]:
        for assembly in entry["assemblies"]:
            finding = FailedCheck(check=entry["check"], resource=resource, assembly=assembly)
            yield finding, entry["reason"]


def find_faults(found: set[FailedCheck], acknowledged: Mapping[FailedCheck, str]) -> list[str]:
    """Return a sentence for each finding without a reason, and each reason without a finding."""
    return [
        f"{_spell(each)} is new: fix it, or give the reason in {ACKNOWLEDGED.name}"
        for each in sorted(found - acknowledged.keys())
    ] + [
        f"{_spell(each)} is no longer found: remove it from {ACKNOWLEDGED.name}"
        for each in sorted(acknowledged.keys() - found)
    ]


def _spell(finding: FailedCheck) -> str:
    return f"{finding.check} of {finding.resource} in assembly {finding.assembly}"

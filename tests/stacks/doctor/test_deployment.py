"""The doctor on the account's bootstrap."""

from pathlib import Path

import pytest

from stacks.parameters import context
from tests.stacks.doctor.conftest import Clinic, Examine, bootstrapped_with


@pytest.mark.parametrize(
    ("key", "state"),
    [
        ("", "ok"),
        ("AWS_MANAGED_KEY", "ok"),
        ("arn:aws:kms:us-east-1:123456789012:key/1", "warning"),
    ],
)
def test_a_key_of_ones_own_for_the_bundle_must_admit_the_machines(
    healthy: Clinic, examine: Examine, key: str, state: str
) -> None:
    with bootstrapped_with(healthy, key):
        (line,) = examine(healthy)["bootstrap"]
    assert line["state"] == state
    if state == "warning":
        assert line["what"].startswith(f"the code bundle is encrypted with {key}: machines boot")
        assert line["fix"].startswith(f"aws kms get-key-policy --key-id {key} ")


def test_the_qualifier_is_the_one_that_synth_takes(
    healthy: Clinic, examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "cdk.json"
    own.write_text(context.CDK_JSON.read_text())
    monkeypatch.setattr(context, "CDK_JSON", own)
    assert examine(healthy)["bootstrap"][0]["state"] == "ok"
    own.with_name("cdk.context.json").write_text('{"@aws-cdk/core:bootstrapQualifier": "team1"}')
    (line,) = examine(healthy)["bootstrap"]
    assert "no /cdk-bootstrap/team1/version" in line["what"]
    assert line["fix"].endswith("--qualifier team1 --toolkit-stack-name CDKToolkit-team1")
    given = "@aws-cdk/core:bootstrapQualifier=hnb659fds"
    assert examine(healthy, given)["bootstrap"][0]["state"] == "ok"

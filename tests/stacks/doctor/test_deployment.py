"""The doctor on the account's bootstrap."""

import pytest

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

"""A fault says what it is of, and holds for its share and its time."""

from typing import Any

import pytest

from embedded_aws.faults import Fault, FaultInjector

DENIED = Fault(action="s3:Put*", status=403)


def test_a_share_of_the_requests_is_met_for_a_time() -> None:
    now = [0.0]
    faults = FaultInjector(clock=lambda: now[0])
    faults.begin([Fault(action="s3:*", status=500, share=0.25, for_seconds=10)])
    met = [faults.meet("s3:GetObject") is not None for _ in range(400)]
    assert 60 < sum(met) < 140
    assert faults.meet("ec2:RunInstances") is None
    now[0] = 10
    assert not any(faults.meet("s3:GetObject") for _ in range(100))


def test_the_first_fault_that_is_met_counts() -> None:
    faults = FaultInjector()
    first, second = DENIED, Fault(action="s3:*", status=500)
    faults.begin([first, second])
    assert faults.meet("s3:PutObject") is first
    assert faults.meet("s3:GetObject") is second
    faults.end()
    assert faults.meet("s3:GetObject") is None


def test_a_fault_of_the_guard_is_not_the_machines() -> None:
    faults = FaultInjector()
    faults.begin([Fault(action="s3:*", status=500, of="guard"), DENIED])
    assert faults.meet("s3:PutObject") is DENIED
    assert faults.meet("s3:GetObject") is None
    met = faults.meet("s3:PutObject", of="guard")
    assert met is not None
    assert met.status == 500


def test_what_no_request_has_met_is_known() -> None:
    """A drill whose fault nobody met would show nothing."""
    faults = FaultInjector()
    faults.begin([DENIED])
    faults.meet("s3:GetObject")
    assert faults.met == set()
    faults.meet("s3:PutObject")
    faults.begin([Fault(action="s3:*", status=500)])
    assert faults.met == {DENIED}
    faults.end()
    assert faults.met == set()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"action": "s4:PutObject", "status": 403}, "action is 's4:PutObject'; write it like ec2:"),
        ({"action": "s3:*"}, "needs exactly one of status, delay_seconds, loses_"),
        ({"action": "s3:*", "status": 500, "delay_seconds": 1}, "needs exactly one of"),
        ({"action": "s3:*", "status": 200}, "status is 200; use an error"),
        ({"action": "s3:*", "status": 500, "share": 0.0}, "share is 0.0; it must be above 0"),
        (
            {"action": "s3:*", "status": 500, "of": "me"},
            "of is 'me'; use machines, guard or",
        ),
        ({"action": "s3:*", "delay_seconds": -1}, "delay_seconds is -1"),
    ],
)
def test_fails_a_fault_that_could_never_be(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Fault(**values)

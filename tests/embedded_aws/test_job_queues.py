"""What a share of a queue has had, by which Batch's queues are ordered."""

from embedded_aws.service_jobs import ServiceJob
from embedded_aws.training_jobs import TrainingJob


def test_a_share_has_had_what_its_jobs_ran_since_and_not_what_they_did_before() -> None:
    def attempt(created: float, ended: float) -> TrainingJob:
        return TrainingJob(
            arn="x", request={}, environment={}, notice_seconds=1.0, created=created, ended=ended
        )

    old, cut, late = attempt(0.0, 5_000.0), attempt(8_000.0, 9_200.0), attempt(9_300.0, 9_400.0)
    job = ServiceJob(id="1", arn="1", queue="gpus", asked={}, attempts=[old, cut, late])
    assert job.seconds_since(9_000.0) == 300.0
    assert job.seconds_since(9_350.0) == 60.0, "a minute at least"
    assert job.seconds_since(9_500.0) == 0.0

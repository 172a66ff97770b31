"""The scenarios on which alarms are tried: healthy runs, and one fault for each alarm."""

from collections.abc import Callable, Mapping

from rehearsal.alarms.streams import Stream

Scenario = Callable[[Stream], None]
HOUR = 60


def good_run(stream: Stream) -> None:
    """boots, prepares features, trains, evaluates, finishes"""
    stream.boot()
    stream.train(40, steps=1, kind="prepare")
    stream.train(3 * HOUR)
    with stream.changed(utilization=0.8 * stream.readings.utilization):
        stream.train(10, steps=0)
    stream.train(1, steps=1, kind="evaluation")
    stream.train(HOUR)


def interruption(stream: Stream) -> None:
    """loses its instance with a notice, waits 12 minutes, resumes elsewhere"""
    stream.boot()
    stream.train(2 * HOUR)
    stream.notice(commits=True)
    stream.without_instance(12)
    stream.boot()
    stream.train(2 * HOUR)


def no_notice(stream: Stream) -> None:
    """loses its instance without a notice"""
    stream.boot()
    stream.train(2 * HOUR)
    stream.without_instance(5)
    stream.boot()
    stream.train(HOUR)


def waits_for_its_dataset(stream: Stream) -> None:
    """waits 30 minutes for a dataset, then syncs it for 30"""
    stream.boot(30)
    with stream.changed(exceeded_percent=40):
        stream.boot(30)
    stream.train(HOUR)


def after_the_end(stream: Stream) -> None:
    """finishes; the fleet stays at zero"""
    stream.boot()
    stream.train(2 * HOUR)
    stream.target = 0
    stream.without_instance(6 * HOUR)


def without_its_fleet(stream: Stream) -> None:
    """finishes; its fleet is deleted"""
    stream.boot()
    stream.train(2 * HOUR)
    stream.without_fleet(3 * HOUR)


def silent_program(stream: Stream) -> None:
    """a program that reports no steps but saves"""
    stream.is_program = True
    stream.boot()
    for _ in range(6):
        stream.train(20, steps=0)
        stream.train(1, steps=0, commits=True)


def terse_program(stream: Stream) -> None:
    """a program that reports its loss every 40 minutes and saves then"""
    stream.is_program = True
    stream.boot()
    for _ in range(6):
        stream.train(40, steps=0)
        stream.train(1, steps=1)


def starved(stream: Stream) -> None:
    """data arrives at a tenth of the pace"""
    stream.boot()
    with stream.changed(utilization=0.1 * stream.readings.utilization):
        stream.train(2 * HOUR, steps=1)


def _after_an_hour(description: str, *, steps: int = 10, **readings: float) -> Scenario:
    """Return a fault that changes the agent's readings after an hour of training."""

    def scenario(stream: Stream) -> None:
        stream.boot()
        stream.train(HOUR)
        with stream.changed(**readings):
            stream.train(HOUR, steps=steps)

    scenario.__doc__ = description
    return scenario


leaking = _after_an_hour("GPU memory fills up", memory_percent=97)
hot = _after_an_hour("the card's cooling fails", celsius=90)
hanging = _after_an_hour("a collective hangs, the GPU spins", steps=0, utilization=100)
full = _after_an_hour("the data volume fills up", disk_percent=93)


def uncommitted(stream: Stream) -> None:
    """training continues, but no commit succeeds"""
    stream.boot()
    stream.train(HOUR)
    stream.commit_every = 0
    stream.train(3 * HOUR)


def unsaved(stream: Stream) -> None:
    """a notice comes, and there is no time to save"""
    stream.boot()
    stream.train(2 * HOUR + 7)
    stream.notice(commits=False)
    stream.without_instance(5)
    stream.boot()
    stream.train(HOUR)


def throttled(stream: Stream) -> None:
    """training reads more than EBS sustains"""
    stream.boot()
    with stream.changed(exceeded_percent=80, utilization=0.65 * stream.readings.utilization):
        stream.train(2 * HOUR, steps=5)


def no_capacity(stream: Stream) -> None:
    """an hour without Spot capacity"""
    stream.boot()
    stream.train(HOUR)
    stream.notice(commits=True)
    stream.without_instance(HOUR)


def guard_fails(stream: Stream) -> None:
    """the Guard raises an error at every call"""
    stream.boot()
    stream.train(HOUR)
    stream.guard_fails = True
    stream.train(HOUR)


def clock_stands_still(stream: Stream) -> None:
    """the Guard's clock is disabled; only other instances' events wake it"""
    stream.boot()
    stream.train(HOUR)
    stream.clock_runs = False
    stream.train(HOUR)


HEALTHY: tuple[Scenario, ...] = (
    good_run,
    interruption,
    no_notice,
    waits_for_its_dataset,
    after_the_end,
    without_its_fleet,
    silent_program,
    terse_program,
)
# By the alarm's construct id, which follows "Alarms" in its logical id.
FAULTS: Mapping[str, Scenario] = {
    "GpuUtilizationLow": starved,
    "GpuMemoryNearlyFull": leaking,
    "GpuHot": hot,
    "StepsStandStill": hanging,
    "CommitTooOld": uncommitted,
    "NoticeWithoutCommit": unsaved,
    "DiskNearlyFull": full,
    "EbsThroughputExceeded": throttled,
    "FleetBelowTarget": no_capacity,
    "GuardErrors": guard_fails,
    "GuardSilent": clock_stands_still,
}

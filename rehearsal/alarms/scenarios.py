"""The scenarios on which alarms are tried: healthy runs, and one fault for each alarm."""

from collections.abc import Callable, Mapping

from rehearsal.alarms.streams import Stream

Scenario = Callable[[Stream], None]
HOUR = 60


def good_run(stream: Stream) -> None:
    stream.boot()
    stream.train(40, steps=1, kind="prepare")
    stream.train(3 * HOUR)
    with stream.changed(utilization=0.8 * stream.readings.utilization):
        stream.train(10, steps=0)
    stream.train(1, steps=1, kind="evaluation")
    stream.train(HOUR)


def interruption(stream: Stream) -> None:
    stream.begin(2 * HOUR)
    stream.notice(commits=True)
    stream.without_instance(12)
    stream.begin(2 * HOUR)


def no_notice(stream: Stream) -> None:
    stream.begin(2 * HOUR)
    stream.without_instance(5)
    stream.begin(HOUR)


def waits_for_its_dataset(stream: Stream) -> None:
    stream.boot(30)
    with stream.changed(exceeded_percent=40):
        stream.boot(30)
    stream.train(HOUR)


def after_the_end(stream: Stream) -> None:
    stream.begin(2 * HOUR)
    stream.target = 0
    stream.without_instance(6 * HOUR)


def without_its_fleet(stream: Stream) -> None:
    stream.begin(2 * HOUR)
    stream.without_fleet(3 * HOUR)


def silent_program(stream: Stream) -> None:
    stream.is_program = True
    stream.boot()
    for _ in range(6):
        stream.train(20, steps=0)
        stream.train(1, steps=0, commits=True)


def terse_program(stream: Stream) -> None:
    stream.is_program = True
    stream.boot()
    for _ in range(6):
        stream.train(40, steps=0)
        stream.train(1, steps=1)


def starved(stream: Stream) -> None:
    stream.boot()
    with stream.changed(utilization=0.1 * stream.readings.utilization):
        stream.train(2 * HOUR, steps=1)


def _one_hour_in(*, steps: int = 10, **readings: float) -> Scenario:
    """Return a fault that changes the agent's readings after an hour of training."""

    def scenario(stream: Stream) -> None:
        stream.begin(HOUR)
        with stream.changed(**readings):
            stream.train(HOUR, steps=steps)

    return scenario


def uncommitted(stream: Stream) -> None:
    stream.begin(HOUR)
    stream.commit_every = 0
    stream.train(3 * HOUR)


def unsaved(stream: Stream) -> None:
    stream.begin(2 * HOUR + 7)
    stream.notice(commits=False)
    stream.without_instance(5)
    stream.begin(HOUR)


def throttled(stream: Stream) -> None:
    stream.boot()
    with stream.changed(exceeded_percent=80, utilization=0.65 * stream.readings.utilization):
        stream.train(2 * HOUR, steps=5)


def no_capacity(stream: Stream) -> None:
    stream.begin(HOUR)
    stream.notice(commits=True)
    stream.without_instance(HOUR)


def guard_fails(stream: Stream) -> None:
    stream.begin(HOUR)
    stream.guard_fails = True
    stream.train(HOUR)


def no_clock(stream: Stream) -> None:
    stream.begin(HOUR)
    stream.clock_runs = False
    stream.train(HOUR)


# By what happens in it.
HEALTHY: Mapping[str, Scenario] = {
    "boots, prepares features, trains, evaluates, finishes": good_run,
    "loses its instance with a notice, waits 12 minutes, resumes elsewhere": interruption,
    "loses its instance without a notice": no_notice,
    "waits 30 minutes for a dataset, then syncs it for 30": waits_for_its_dataset,
    "finishes; the fleet stays at zero": after_the_end,
    "finishes; its fleet is deleted": without_its_fleet,
    "a program that reports no steps but saves": silent_program,
    "a program that reports its loss every 40 minutes and saves then": terse_program,
}
# By the alarm's construct id, which follows "Alarms" in its logical id: what happens, and how.
FAULTS: Mapping[str, tuple[str, Scenario]] = {
    "GpuUtilizationLow": ("data arrives at a tenth of the pace", starved),
    "GpuMemoryNearlyFull": ("GPU memory fills up", _one_hour_in(memory_percent=97)),
    "GpuHot": ("the card's cooling fails", _one_hour_in(celsius=90)),
    "StepsStandStill": (
        "a collective hangs, the GPU spins",
        _one_hour_in(steps=0, utilization=100),
    ),
    "CommitTooOld": ("training continues, but no commit succeeds", uncommitted),
    "NoticeWithoutCommit": ("a notice comes, and there is no time to save", unsaved),
    "DiskNearlyFull": ("the data volume fills up", _one_hour_in(disk_percent=93)),
    "EbsThroughputExceeded": ("training reads more than EBS sustains", throttled),
    "FleetBelowTarget": ("an hour without Spot capacity", no_capacity),
    "GuardErrors": ("the Guard raises an error at every call", guard_fails),
    "GuardSilent": (
        "the Guard's clock is disabled; only other instances' events wake it",
        no_clock,
    ),
}

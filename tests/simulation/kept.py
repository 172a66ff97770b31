"""Lives that once broke a promise, or show a planted fault, each as short as it can be.

A plan is kept and not its seed: what a seed draws changes with what the world can play.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.simulation.habits import Habit
from tests.simulation.plan import DAY, Happening, Kind, Plan
from tests.stacks.guard.world import HOUR, MINUTE, Life

_MILD = Plan(
    seed=1,
    fleet="spot",
    life=Life(boot=5 * MINUTE),
    steps=90,
    step_seconds=40.0,
    evaluation_every=0,
    evaluation_seconds=30.0,
    state_bytes=1e9,
    upload_rate=1e8,
    latency=-3.0,
    interval="auto",
    policy="train-on",
    keep=3,
    slow_seconds=60.0,
    max_hours=1e4,
    max_usd=0.0,
    deadline_hours=0.0,
    forecast_share=1.0,
    happenings=(),
)
_LARGE: dict[str, Any] = {"state_bytes": 30e9, "upload_rate": 25e6, "step_seconds": 60.0}
_STREAMED: dict[str, Any] = {"state_bytes": 41e9, "upload_rate": 41e6, "step_seconds": 67.0}
_SHARED: dict[str, Any] = {
    "ranks": 2, "is_sharded": True, "is_gpu": True, "step_seconds": 45.0, "steps": 8,
    "evaluation_every": 3, "evaluation_seconds": 50.0,
}  # fmt: skip


def _at(hours: float, what: Kind, **figures: Any) -> Happening:
    return Happening(at=hours * HOUR, what=what, **figures)


def _plan(*happenings: Happening, **changes: Any) -> Plan:
    return replace(_MILD, happenings=happenings, **changes)


def _program(*happenings: Happening, **habit: Any) -> Plan:
    usual: dict[str, Any] = {"kind": "in place", "save_every": 200.0, "write_seconds": 30.0}
    return _plan(*happenings, program=Habit(**{**usual, **habit}))


_LOSSES = tuple(_at(3 + 4 * n, "takeback", seconds=120.0) for n in range(12))
# What happens, and the faults of faults.py that it shows.
KEPT: Mapping[str, tuple[Plan, tuple[str, ...]]] = {
    "a save at a stage's end that takes 20 minutes": (
        _plan(**_LARGE, steps=20), ("a save is a hang",),
    ),
    "a restore of 20 minutes": (
        _plan(_at(1.5, "takeback", seconds=120.0), **_LARGE, steps=120),
        ("a long restore is a hang",),
    ),
    "a state that memory does not hold twice": (
        _plan(**_STREAMED, steps=60, interval="600s"),
        ("a commit before each long step", "a blocking save is due at once"),
    ),
    "lives of four hours and saves of 20 minutes": (
        _plan(*_LOSSES, **_LARGE, steps=500),
        ("auto waits longer than a life",),
    ),
    "a head deleted while a machine boots": (
        _plan(_at(0.8, "takeback", seconds=120.0), _at(0.88, "head deleted", seconds=600.0)),
        ("a head from nothing",),
    ),
    "a head deleted and restored between two calls of the Guard": (
        _plan(_at(0.55, "head deleted", seconds=50.0)), ("a lost lease is not tried again",),
    ),
    "all checkpoints damaged": (
        _plan(_at(0.6, "checkpoints damaged"), _at(0.6001, "power off")),
        ("no witness is enough",),
    ),
    "a clock that jumps back": (
        _plan(_at(0.6, "crash"), _at(0.8, "clock", share=-0.4)), (),
    ),
    "a clock that jumps back while a program appends lines": (
        _program(_at(0.3, "clock", share=-19.0), _at(0.6, "power off"), kind="append",
                 save_every=40.0, write_seconds=0.0, writes_at_start=True),
        (),
    ),
    "a notice in mid-life": (
        _plan(_at(0.9, "takeback", seconds=120.0), interval="600s"),
        ("notices unheard", "no save at a notice", "deleted before the head forgets",
         "a sweep of what the head names"),
    ),
    "a loss without a notice just after a commit": (
        _plan(*(_at(0.2 + 0.1 * n, "power off") for n in range(4)), interval="1steps",
              step_seconds=2.0, steps=600, state_bytes=1e7),
        ("metrics sent after the head",),
    ),
    "a sync of three hours, told by its boot alone": (
        _plan(life=Life(boot=5 * MINUTE, sync=3 * HOUR), steps=20), ("a sync is silence",),
    ),
    "S3 away for a minute as an attempt begins": (
        _plan(_at(0.5, "takeback", seconds=120.0),
              _at(2283 / HOUR, "s3", how="outage", whose="machines", seconds=55.0)),
        ("S3's trouble outlasts patience",),
    ),
    "answers lost for some minutes": (
        _plan(_at(0.5, "s3", how="lost", whose="machines", seconds=300.0)),
        ("a lost answer is a lost lease",),
    ),
    "a policy that denies the bucket to all": (
        _plan(_at(0.5, "s3", how="denied", whose="all", seconds=3 * HOUR)),
        ("a bucket that refuses is waited for",),
    ),
    "takebacks in short order": (
        _plan(*(_at(0.05 + 0.12 * n, "takeback", seconds=120.0) for n in range(6))),
        ("takebacks counted as barren",),
    ),
    "a machine whose user data never runs": (
        _plan(_at(0.0, "dead boot", how="silent")), ("a machine is awaited that never spoke",),
    ),
    "a machine that hangs": (
        _plan(_at(0.5, "hang", share=1.0)), ("silence ignored", "heartbeats ignored"),
    ),
    "a deadline without Spot": (
        _plan(_at(0.5, "no capacity", seconds=20 * HOUR), deadline_hours=4.0),
        ("the deadline ignored",),
    ),
    "a deadline whose Spot goes before the first evaluation": (
        _plan(_at(0.82, "no capacity", seconds=5.3 * HOUR), steps=95, step_seconds=208.0,
              evaluation_every=13, evaluation_seconds=600.0, deadline_hours=9.6,
              forecast_share=1.35),
        ("evaluations before the first left out",),
    ),
    "a deploy that drops the deadline": (
        _plan(_at(0.5, "no capacity", seconds=1.5 * HOUR), _at(1.2, "deploy"), steps=540,
              deadline_hours=7.2),
        ("on demand beside Spot for ever", "machines left alone at the end"),
    ),
    "a machine on demand that hangs": (
        _plan(_at(0.5, "no capacity", seconds=20 * HOUR), _at(1.5, "hang"), deadline_hours=3.0,
              steps=200),
        ("machines left alone at the end",),
    ),
    "a machine on demand past max_hours, of groups": (
        _plan(_at(0.5, "no capacity", seconds=20 * HOUR), deadline_hours=3.0, max_hours=1.5,
              steps=200, fleet="asg"),
        ("only Spot to zero",),
    ),
    "a boot of two hours": (
        _plan(life=Life(boot=2 * HOUR)), ("steps of a boot ignored",),
    ),
    "an outage of two hours, which begins before a sync gets anything done": (
        _plan(_at(1 / 6, "s3", how="outage", whose="all", seconds=7262.0),
              life=Life(boot=16 * MINUTE, sync=HOUR), seed=3),
        ("silence counted while S3 was down",),
    ),
    "an outage at a save, and an hour until the next one": (
        _plan(_at(1.09, "s3", how="outage", whose="machines", seconds=170.0), interval="3600s",
              steps=200),
        ("no early retry after a failed save",),
    ),
    "a loss between merged metrics and the end of their parts": (
        _plan(_at(172.08 / 60, "power off"), latency=1.0, steps=400),
        ("metrics counted twice",),
    ),
    "a head deleted while a machine waits for its holder": (
        _plan(_at(0.5, "no capacity", seconds=1.5 * HOUR), _at(1.2, "deploy"),
              _at(2.13, "head deleted", seconds=HOUR), steps=540, deadline_hours=7.2),
        ("a head from nothing after a wait",),
    ),
    "groups that begin empty": (_plan(fleet="asg", steps=20), ("a new group left empty",)),
    "a person's stop of groups": (
        _plan(_at(0.5, "person stops", seconds=2 * HOUR), fleet="asg"),
        ("an ended group started again",),
    ),
    "dollars that run out": (
        _plan(_at(0.6, "price", share=0.9), max_usd=1.0, steps=360),
        ("no reserve before max_usd", "the market's price ignored"),
    ),
    "a stop after newer commits were damaged": (
        _plan(_at(0.8, "checkpoints damaged", share=0.5), _at(0.801, "power off"), max_hours=1.0,
              interval="600s", step_seconds=120.0, steps=60),
        ("a damaged one ends the resume",),
    ),
    "two runs with one budget": (
        _plan(steps=360, interval="600s", beside=(replace(_MILD, seed=2, steps=360, fleet="asg"),),
              budget_usd=2.6),
        ("a budget that no one judges", "the dearest run is the budget's",
         "a charge forgets the others"),
    ),
    "an on-demand machine too many, beside other runs": (
        _plan(_at(0.5, "no capacity", seconds=1.5 * HOUR), _at(1.2, "deploy"),
              _at(2.02, "guard off", seconds=HOUR), steps=540,
              deadline_hours=7.2,
              beside=(replace(_MILD, seed=2, fleet="asg", steps=900),
                      replace(_MILD, seed=3, steps=900))),
        ("machines of all stacks are its own",),
    ),
    "losses of one run, in the pools of others": (
        _plan(*(_at(0.5 + 0.15 * n, "takeback", seconds=120.0) for n in range(5)), has_pools=True,
              beside=tuple(replace(_MILD, seed=n, fleet="asg", steps=400) for n in (2, 3))),
        ("groups leave the pool of their machine",),
    ),
    "a budget of each day": (
        _plan(steps=3000, beside=(replace(_MILD, seed=2, steps=2400),), budget_usd=18.0,
              budget_period="day"),
        ("a run's dollars count in each period",),
    ),
    "a budget of each month": (
        _plan(steps=1800, beside=(replace(_MILD, seed=2, steps=1700),), budget_usd=12.0,
              after_seconds=29 * DAY - 10 * HOUR),
        ("a run's dollars count in each period",),
    ),
    "three days with another run's deploy": (
        _plan(_at(0.7, "new version", how="other run", seconds=3 * DAY), steps=180, max_hours=24.0),
        ("what ended while nobody looked is billed for ever",),
    ),
    "an hour with another run's deploy": (
        _plan(_at(0.7, "new version", how="other run", seconds=1.25 * HOUR), steps=180,
              max_hours=2.8),
        ("what ended while nobody looked is billed for ever",),
    ),
    "a fleet of another kind": (
        _plan(_at(0.7, "new version", how="kind"), steps=180), ("the fleet's id read once",),
    ),
    "a fleet replaced after the run's end": (
        _plan(_at(1.6, "new version", how="template"), steps=60), (),
    ),
    "groups updated in a person's stop": (
        _plan(_at(0.5, "person stops", seconds=2 * HOUR),
              _at(1.0, "new version", how="template"), fleet="asg"),
        (),
    ),
    "the Guard of 0.1.0 for two hours": (
        _plan(_at(0.5, "new version", how="guard", seconds=2 * HOUR), steps=360),
        ("an older ledger is none",),
    ),
    "an older trainer, and then the newer one": (
        _plan(_at(0.01, "new version", how="trainer", seconds=0.75 * HOUR),
              _at(0.9, "takeback", seconds=120.0)),
        ("an older head is refused",),
    ),
    "an older trainer that refuses the newer one's head": (
        _plan(_at(0.6, "new version", how="trainer", seconds=HOUR),
              _at(0.7, "takeback", seconds=120.0)),
        ("a run given up in silence",),
    ),
    "a run given up while no Guard looked": (
        _plan(_at(0.6, "new version", how="trainer", seconds=HOUR),
              _at(0.65, "guard off", seconds=2.5 * HOUR), _at(0.7, "takeback", seconds=120.0)),
        (),
    ),
    "a head deleted before the first commit": (
        _plan(_at(0.15, "head deleted", seconds=4 * HOUR), step_seconds=300.0, steps=12),
        ("a generation is used again",),
    ),
    "a Guard of 0.1.0 after a limit was lowered": (
        _plan(_at(2.5, "deploy", share=0.5), _at(2.9, "new version", how="guard",
                                                  seconds=0.5 * HOUR), steps=360, max_hours=4.0),
        ("limits forgotten by an older Guard",),
    ),
    "a notice while two ranks wait for the lease": (
        _plan(_at(0.5, "power off"), _at(0.61, "takeback", seconds=120.0), ranks=2),
        ("rank 0 alone ends while all wait for the lease",),
    ),
    "shares of two ranks that are too slow for a notice": (
        _plan(_at(416 / HOUR, "takeback", seconds=120.0), **_SHARED, state_bytes=6e9),
        (),
    ),
    "shares of two ranks at a notice of 20 seconds": (
        _plan(_at(491 / HOUR, "takeback", seconds=20.0), ranks=2, is_sharded=True, is_gpu=True,
              step_seconds=7.0, steps=40, state_bytes=4e9, seed=5),
        ("dropped shares waited for",),
    ),
    "four ranks, of which one alone hears of what comes": (
        _plan(_at(0.5, "rebalance"), _at(0.9, "takeback", seconds=120.0), interval="600s",
              ranks=4, hears="other"),
        ("a vote that asks no other rank", "a recommendation to another rank lost"),
    ),
    "two ranks that all hear of a notice": (
        _plan(_at(0.95, "takeback", seconds=120.0), interval="600s", ranks=2, hears="all",
              step_seconds=28.0, steps=120),
        ("ranks that follow end before they are told",),
    ),
    "a save of 20 minutes, for which another rank waits": (
        _plan(**_LARGE, steps=20, ranks=2), ("ranks that follow watch for hangs",),
    ),
    "a rank that crashes, and one that hangs": (
        _plan(_at(0.5, "rank", how="crash", whose="1", share=-9.0),
              _at(0.8, "rank", how="hang in a step", whose="3"), ranks=4, is_gpu=True),
        ("a rank's end that nobody watches",),
    ),
    "steps of two ranks that diverge, once or for their data": (
        _plan(_at(0.5, "diverge", how="data"), _at(0.7, "diverge", how="once"),
              _at(0.75, "diverge", how="data"), _at(0.8, "takeback", seconds=120.0),
              _at(1.0, "diverge", how="data"), ranks=2, interval="600s"),
        ("a step that diverges is not left out", "no rank is told of a divergence",
         "training goes back as the same generation"),
    ),
    "a step that diverges in the last seconds of a notice": (
        _plan(_at(0.5, "diverge", how="once"), _at(0.5 + 304 / HOUR, "takeback", seconds=120.0),
              step_seconds=300.0, steps=20, state_bytes=4e9),
        ("training goes back while its copy is saved",),
    ),
    "three steps in a row that diverge": (
        _plan(*(_at(0.5 + 0.01 * n, "diverge", how="data") for n in range(4)), ranks=2),
        ("steps that diverge are counted alike",),
    ),
    "attempts of two, eight, four and one ranks": (
        _plan(*(_at(0.4 + 0.3 * n, "takeback", seconds=120.0) for n in range(4)), ranks=2,
              is_sharded=True, mixes_ranks=True, seed=7),
        (),
    ),
    "a ledger that is damaged": (_plan(_at(1.0, "ledger damaged"), max_hours=3.0, steps=360), ()),
    "a ledger that is damaged, after machines that nobody lists any more": (
        _plan(*(_at(0.5 + 0.7 * n, "takeback", seconds=120.0) for n in range(8)),
              _at(1.0, "ledger damaged"), max_hours=3.0, steps=500),
        ("versions of guard.json ignored",),
    ),
    "a program's best state, written slowly beside a larger one": (
        _program(_at(0.71, "power off"), has_best=True),
        ("a save that took long is a log", "blobs stay for ever"),
    ),
    "a program whose save is two files, with a pause between them": (
        _program(_at(0.5, "power off"), kind="pair", pieces=2, pause_seconds=5.0),
        ("no pause is waited for", "blobs that the head needs are swept"),
    ),
    "a program that appends a line for each thing that it has done": (
        _program(_at(0.7, "power off"), kind="append", save_every=40.0, write_seconds=0.0),
        ("growth is no state",),
    ),
    "a program that writes a save for ten minutes, with pauses": (
        _program(save_every=1500.0, write_seconds=600.0), ("an open file is a whole one",),
    ),
    "a program that ends in a save, at a notice": (
        _program(_at(0.56, "takeback", seconds=120.0), handler="exit", handler_code=143),
        ("what died in a save counts",),
    ),
    "a program whose two files are never long at rest": (
        _program(kind="pair", pieces=2, pause_seconds=5.0, save_every=40.0, write_seconds=15.0),
        ("what may be torn is not marked",),
    ),
    "a program that saves while 40 GB are copied": (
        replace(_program(kind="pair", pieces=2, save_every=20.0, write_seconds=4.0, clones=False),
                state_bytes=40e9, upload_rate=1e9, step_seconds=20.0, steps=180),
        ("a folder that changes is captured",),
    ),
    "a program that ignores a notice of 85 seconds": (
        replace(_program(_at(0.8, "takeback", seconds=85.0), kind="rename", write_seconds=4.0,
                         handler="ignore"), state_bytes=1e8),
        ("the notice's time not read",),
    ),
    "a trainer that dies after a save that nobody has captured": (
        _program(_at(0.49, "crash"), kind="numbered", keep_last=4),
        ("a restore leaves what was there",),
    ),
    "shards with pauses, and an exit at the notice": (
        _program(
            _at(0.5, "takeback", seconds=120.0), kind="shards", pieces=4, pause_seconds=5.0,
            handler="exit", handler_code=143, logs=("train.log",), reports=True,
        ),
        (),
    ),
}  # fmt: skip

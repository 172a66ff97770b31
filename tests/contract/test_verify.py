"""A run's record is sound by every rule, and each rule finds what breaks it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from contract.keys import CHECKPOINTS
from contract.samples import MODULUS, sum_of_all
from contract.trace import RunTrace
from contract.verify import RULES, broken_rules, verify

BATCH, SAMPLES = 4, 12
FIRST, SECOND, LAST = (
    f"{step:08d}-g{generation:04d}-{generation:016x}"
    for step, generation in ((3, 1), (5, 2), (6, 3))
)
# The store's time of a machine's time.
STORED = 1_000_000.0


def step(number: int, generation: int) -> dict[str, Any]:
    first = (number - 1) * BATCH % SAMPLES
    ids = (sum_of_all(first + BATCH) - sum_of_all(first)) % MODULUS
    where = {"kind": "step", "stage": "head", "epoch": (number - 1) * BATCH // SAMPLES}
    counts = {"num_samples": BATCH, "split_samples": SAMPLES, "ids_sum": f"{ids:016x}"}
    return {**where, **counts, "step": number, "generation": generation}


def resume(generation: int, checkpoint: str | None) -> dict[str, Any]:
    number = int(checkpoint[:8]) if checkpoint else 0
    line = {"kind": "resume", "generation": generation, "step": number, "checkpoint": checkpoint}
    return {**line, "passed_over": []}


def event(seconds: float, machine: str, name: str, **fields: Any) -> dict[str, Any]:
    who = {"instance_id": machine, "name": name, "source": "trainer", "stored": STORED + seconds}
    return {"time": f"2026-11-28T00:{seconds // 60:02.0f}:{seconds % 60:06.3f}Z", **who, **fields}


def head(generation: int, *names: str, state: str = "running") -> dict[str, Any]:
    files = [{"name": "state.json", "bytes": 2}]
    checkpoints = [{"name": n, "step": int(n[:8]), "files": files} for n in names]
    writer = {"writer": f"i-{generation}", "generation": generation}
    return {**writer, "state": state, "checkpoints": checkpoints}


def sound() -> RunTrace:
    """Three machines: one killed, one with a notice, one that finishes."""
    heads = [
        (0, head(1)),
        (60, head(1, FIRST)),
        (120, head(2, FIRST)),
        (150, head(2, FIRST, SECOND, state="released")),
        (200, head(3, FIRST, SECOND)),
        (230, head(3, SECOND, LAST)),
        (240, head(3, SECOND, LAST, state="finished")),
    ]
    attempt = {"usd": 0.1, "usd_per_hour": 0.5, "is_live": False}
    spans = {"i-1": (-60, 100), "i-2": (60, 155), "i-3": (160, 300)}
    return RunTrace(
        config={"workload": "trajectory", "origin": None},
        head=heads[-1][1],
        heads=[(STORED + when, one) for when, one in heads],
        deleted={FIRST: STORED + 235},
        sizes={f"{CHECKPOINTS}{name}/state.json": 2 for name in (SECOND, LAST)},
        writers=frozenset((number, f"{number:04d}-a") for number in (1, 2, 3)),
        lines=[
            *(resume(1, None), *(step(number, 1) for number in (1, 2, 3, 4))),
            *(resume(2, FIRST), step(4, 2), step(5, 2)),
            *(resume(3, SECOND), step(6, 3)),
        ],
        events=[
            event(0, "i-1", "take-over", generation=1),
            event(60, "i-1", "committed", step=3),
            event(120, "i-2", "take-over", generation=2),
            # A step took half of the notice: what is left counts from here, the answer from there.
            event(149, "i-2", "notice", seconds_left=5.0, notice_seconds=10.0, cause="notice"),
            event(150, "i-2", "committed", step=5, notice_to_commit_seconds=5.9),
            event(151, "i-2", "released", generation=2),
            event(200, "i-3", "take-over", generation=3),
            event(230, "i-3", "committed", step=6),
            event(239, "i-3", "finished", step=6),
        ],
        ledger={
            "attempts": {
                machine: {**attempt, "launched": STORED + begin, "seen": STORED + end}
                for machine, (begin, end) in spans.items()
            },
            "limits": {"usd": 20.0, "hours": 72.0, "seconds": 900.0},
        },
    )


def test_a_sound_run_breaks_no_rule_and_lacks_nothing() -> None:
    assert [(each.rule, each.word) for each in verify(sound())] == [
        (rule, "kept") for rule in RULES
    ]


def test_each_rule_says_its_promise() -> None:
    assert all(each.promise.endswith(".") for each in verify(sound()))


def _lines(trace: RunTrace, change: Callable[[list[dict[str, Any]]], Any]) -> RunTrace:
    lines = deepcopy([dict(line) for line in trace.lines])
    change(lines)
    return replace(trace, lines=lines)


def _events(trace: RunTrace, name: str, *, drop: bool = False, **fields: Any) -> RunTrace:
    """Change, or drop, the second machine's event of this name."""
    events = []
    for each in trace.events:
        is_it = each["name"] == name and each["instance_id"] == "i-2"
        events += [] if is_it and drop else [{**each, **fields} if is_it else each]
    return replace(trace, events=events)


def _heads(trace: RunTrace, index: int, when: float, changed: dict[str, Any]) -> RunTrace:
    heads = list(trace.heads)
    heads.insert(index, (STORED + when, changed))
    return replace(trace, heads=heads)


def _attempt(trace: RunTrace, **fields: float) -> RunTrace:
    ledger: Any = deepcopy(trace.ledger)
    ledger["attempts"]["i-3"] |= fields
    return replace(trace, ledger=ledger)


def _taken(trace: RunTrace) -> RunTrace:
    """A machine that nobody heard of after its notice."""
    return _taken_head(_events(_events(trace, "committed", drop=True), "released", drop=True))


def _taken_head(trace: RunTrace) -> RunTrace:
    """Without the head that it released."""
    return replace(trace, heads=[each for each in trace.heads if each[0] != STORED + 150])


def _silent(trace: RunTrace) -> RunTrace:
    """A machine that heartbeats through its notice, and never commits."""
    trace = _taken(trace)
    trace = _lines(trace, lambda lines: lines.insert(-2, {**resume(3, FIRST)}))
    return _heads(trace, 4, 154, head(2, FIRST, SECOND))


STALE = f"{4:08d}-g0001-{9:016x}"
VIOLATIONS: dict[str, tuple[str, str, Callable[[RunTrace], RunTrace]]] = {
    "two writers": (
        "one-writer",
        "generation 2 has 2 writers of metrics",
        lambda t: replace(t, writers=t.writers | {(2, "0002-b")}),
    ),
    "two take-overs": (
        "one-writer",
        "generation 2 has 2 take-overs",
        lambda t: replace(t, events=[*t.events, event(121, "i-9", "take-over", generation=2)]),
    ),
    "a stale commit": (
        "one-writer",
        f"{STALE} was committed while generation 2 held the lease",
        lambda t: _heads(t, 3, 130, head(2, FIRST, STALE)),
    ),
    "a foreign head": (
        "one-writer",
        "i-7 wrote the head of i-2, in generation 2",
        lambda t: _heads(t, 3, 130, {**head(2, FIRST), "writer": "i-7"}),
    ),
    "a sample twice": (
        "samples-once",
        "stage 'head', epoch 1: 12 samples of 12: some were seen more than once, others never",
        lambda t: _lines(t, lambda lines: lines[-1].update(ids_sum=step(5, 3)["ids_sum"])),
    ),
    "a step missing": (
        "samples-once",
        "steps are missing from the lineage: [5]",
        lambda t: _lines(t, lambda lines: lines.pop(-3)),
    ),
    "a commit lost": (
        "commits-kept",
        "generation 3 began with step 3; 5 was committed before",
        lambda t: _lines(t, lambda lines: lines[-2].update(checkpoint=FIRST, step=3)),
    ),
    "a held step repeated": (
        "commits-kept",
        f"generation 2 repeated step 3, held by {FIRST}",
        lambda t: _lines(t, lambda lines: lines.insert(6, step(3, 2))),
    ),
    "a later generation": (
        "generations-in-order",
        "generation 4 has written, but the head is of generation 3",
        lambda t: _lines(t, lambda lines: lines.append({"kind": "start", "generation": 4})),
    ),
    "a generation left out": (
        "generations-in-order",
        "generation 3 followed 1",
        lambda t: replace(t, heads=[one for one in t.heads if one[1]["generation"] != 2]),
    ),
    "an older step": (
        "generations-in-order",
        "step 6 is generation 1's, after 2",
        lambda t: _lines(t, lambda lines: lines[-1].update(generation=1)),
    ),
    "a named file gone": (
        "deleted-after-forgotten",
        f"the head names 2 bytes of {CHECKPOINTS}{LAST}/state.json, and 0 are there",
        lambda t: replace(t, sizes={k: v for k, v in (t.sizes or {}).items() if LAST not in k}),
    ),
    "deleted too early": (
        "deleted-after-forgotten",
        f"{FIRST} was deleted 30 s before the head forgot it",
        lambda t: replace(t, deleted={FIRST: STORED + 200}),
    ),
    "a late answer": (
        "notices-answered",
        "generation 2 had a notice of 10 s and committed after 12.0 s",
        lambda t: _events(t, "committed", notice_to_commit_seconds=12.0),
    ),
    "no answer": (
        "notices-answered",
        "generation 2 had a notice of 5 s, lived that long and committed nothing",
        _silent,
    ),
    "too many dollars": (
        "within-limits",
        "20.70 usd were billed, 20 allowed",
        lambda t: _attempt(t, usd=20.5),
    ),
    "too many hours": (
        "within-limits",
        "73.07 hours were billed, 72 allowed",
        lambda t: _attempt(t, launched=STORED + 300 - 73 * 3600),
    ),
    "a head after the end": (
        "nothing-after-the-end",
        "the head became running after it was finished",
        lambda t: _heads(t, 7, 250, head(4, SECOND, LAST)),
    ),
    "a machine after the end": (
        "nothing-after-the-end",
        "i-3 ran until 3600 s after the end",
        lambda t: _attempt(t, seen=STORED + 240 + 3600),
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_finds_a_planted_violation(name: str) -> None:
    rule, why, plant = VIOLATIONS[name]
    assert f"{rule}: {why}" in broken_rules(plant(sound()))


def test_a_machine_that_a_deploy_starts_after_the_end_has_a_tick_to_see_it() -> None:
    began = STORED + 240 + 7200
    assert broken_rules(_attempt(sound(), launched=began, seen=began + 600)) == []
    (found,) = broken_rules(_attempt(sound(), launched=began, seen=began + 1800))
    assert found == "nothing-after-the-end: i-3 ran until 9000 s after the end"


@pytest.mark.parametrize("after", [4.9, 7.0])
def test_a_released_head_answers_a_notice_whose_events_were_lost(after: float) -> None:
    """Seeds 25168 and 35161: S3 was in trouble, and kept the release alone."""
    trace = _heads(_taken(sound()), 3, 149 + after, head(2, FIRST, state="released"))
    assert not [why for why in broken_rules(trace) if "notices-answered" in why]


@pytest.mark.parametrize(("stored", "is_kept"), [(155, True), (156, False)])
def test_an_answer_of_which_s3_alone_tells_has_a_second_more(stored: int, is_kept: bool) -> None:
    """Seed 65219: of a notice of 3.6 s; S3 tells whole seconds, rounded down."""
    trace = _events(_events(sound(), "committed", drop=True), "released", stored=STORED + stored)
    trace = _taken_head(trace)
    assert is_kept is not any("notices-answered" in why for why in broken_rules(trace))


@pytest.mark.parametrize(("seconds", "is_kept"), [(10.9, True), (11.1, False)])
def test_an_answer_has_a_second_more_as_ec2_tells_whole_seconds(
    seconds: float, is_kept: bool
) -> None:
    """Seed 493744: of a notice of 7.2 s, after 7.4."""
    trace = _events(sound(), "committed", notice_to_commit_seconds=seconds)
    assert is_kept is not any("notices-answered" in why for why in broken_rules(trace))


def test_a_program_goes_back_past_what_retention_has_forgotten() -> None:
    """Seed 55545: three snapshots that may be torn were no good, and only a whole one was kept."""
    fourth = f"{4:08d}-g0002-{9:016x}"
    trace = replace(
        sound(),
        lines=[resume(1, None), resume(2, FIRST), resume(3, FIRST)],
        events=[
            *sound().events,
            event(145, "i-2", "committed", step=4),
            event(199, "i-3", "failed-start", snapshot=SECOND, place="load"),
        ],
    )
    broken = [why for why in broken_rules(trace) if "commits-kept" in why]
    assert broken == ["commits-kept: generation 3 began with step 3; 4 was committed before"]
    kept = _heads(trace, 3, 145, head(2, FIRST, fourth))
    assert not [why for why in broken_rules(kept) if "commits-kept" in why]


def test_a_release_is_as_old_as_its_head_however_late_its_event_is_kept() -> None:
    """Seed 36650: of a notice of 11 s, at latencies of 0.2 s."""
    trace = _events(_events(sound(), "committed", drop=True), "released", stored=STORED + 156)
    assert not [why for why in broken_rules(trace) if "notices-answered" in why]


def test_a_head_that_a_person_restores_is_no_sign_of_its_writer() -> None:
    trace = _events(_events(sound(), "committed", drop=True), "released", drop=True)
    told = {**head(2, FIRST), "nonce": "a"}
    trace = replace(trace, heads=[(STORED + when, told) for when in (125, 1200)])
    assert not [why for why in broken_rules(trace) if "notices-answered" in why]
    later = replace(trace, heads=[(STORED + 125, told), (STORED + 1200, {**told, "nonce": "b"})])
    assert [why for why in broken_rules(later) if "notices-answered" in why]


def test_the_heads_are_gone_through_once_however_many_notices_came() -> None:
    """A run of weeks has 10,000 heads a day, and a machine's loss each hour."""
    num_read = 0

    class Head(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal num_read
            num_read += key == "nonce"
            return super().get(key, default)

    trace = sound()
    told = [each for each in trace.events if each["instance_id"] == "i-2"]
    heads = [(when, Head(one)) for when, one in trace.heads]
    verify(replace(trace, heads=heads, events=[*trace.events, *told * 5]))
    assert num_read == len(heads)


@pytest.mark.parametrize(("minutes", "is_kept"), [(12, True), (18, True), (31, False)])
def test_a_machine_that_a_deploy_starts_beyond_the_limit_has_a_tick_to_be_seen(
    minutes: float, is_kept: bool
) -> None:
    trace = _attempt(sound(), launched=STORED + 200, seen=STORED + 200 + 60 * minutes)
    trace.ledger["attempts"]["i-1"]["launched"] = STORED + 100 - 72.1 * 3600
    assert is_kept is not any(why.startswith("within-limits") for why in broken_rules(trace))


def test_plants_a_violation_of_every_rule() -> None:
    assert {rule for rule, *_ in VIOLATIONS.values()} == RULES.keys()


@pytest.mark.parametrize(
    "excuse",
    [
        lambda t: _lines(
            t, lambda lines: lines[-2].update(passed_over=[{"name": SECOND, "why": "damaged"}])
        ),
        lambda t: replace(
            t, events=[*t.events, event(190, "me", "reopened", dropped=[SECOND], checkpoint=FIRST)]
        ),
    ],
)
def test_a_commit_that_was_given_up_holds_no_step(excuse: Callable[[RunTrace], RunTrace]) -> None:
    lost = _lines(sound(), lambda lines: lines[-2].update(checkpoint=FIRST, step=3))
    assert not [why for why in broken_rules(excuse(lost)) if "commits-kept" in why]


def test_an_attempt_is_left_behind_where_the_next_one_could_read_what_it_could_not() -> None:
    """Seed 81456: S3 was slow, so the second went back behind the newest commit, and was lost."""
    older, newest = f"{2:08d}-g0001-{2:016x}", f"{4:08d}-g0001-{4:016x}"
    slow = {**resume(2, older), "passed_over": [{"name": newest, "why": "S3 was slow"}]}
    lines = [resume(1, None), *(step(n, 1) for n in (1, 2, 3, 4)), slow, step(3, 2)]
    lines += [resume(3, newest), step(5, 3), step(6, 3)]
    trace = replace(sound(), head=head(3, newest, LAST), heads=(), events=[], lines=lines)
    found = {one.rule: one.broken for one in verify(trace)}
    assert not found["samples-once"] and not found["generations-in-order"]


@pytest.mark.parametrize("is_over", [True, False])
def test_what_one_attempt_could_not_read_counts_where_the_next_one_could(is_over: bool) -> None:
    """The second has committed; the third cannot read that, and is lost before it commits."""
    older, newest = f"{2:08d}-g0001-{2:016x}", f"{4:08d}-g0002-{4:016x}"
    slow = {**resume(3, older), "passed_over": [{"name": newest, "why": "S3 was slow"}]}
    lines = [resume(1, None), step(1, 1), step(2, 1), resume(2, older), step(3, 2), step(4, 2)]
    lines += [slow, step(3, 3)]
    stopped = head(3, older, newest, state="released")
    if is_over:
        lines += [resume(4, newest), step(5, 4), step(6, 4)]
        stopped = head(4, newest, LAST)
    trace = replace(sound(), head=stopped, heads=(), events=[], lines=lines)
    found = {one.rule: one.broken for one in verify(trace)}
    assert not found["samples-once"] and not found["generations-in-order"]


@pytest.mark.parametrize("passed_over", [True, False], ids=["damaged", "started over"])
def test_the_lineage_ends_where_the_next_attempt_would_begin(passed_over: bool) -> None:
    """What the head still names beyond that was damaged, or is left behind."""
    lines = [resume(1, None), *(step(n, 1) for n in (1, 2, 3, 4, 5)), resume(2, FIRST), step(4, 2)]
    older, newer, beyond = (f"{n:08d}-g000{g}-{n:016x}" for n, g in ((3, 1), (4, 2), (5, 1)))
    if passed_over:
        lines[-2] = {**resume(2, older), "passed_over": [{"name": beyond, "why": "damaged"}]}
    stopped = head(2, older, beyond, newer, state="released")
    stopped["checkpoints"][1]["is_left_behind"] = not passed_over
    trace = replace(sound(), head=stopped, heads=(), events=[], lines=lines)
    found = {one.rule: one.broken for one in verify(trace)}
    assert not found["samples-once"] and not found["generations-in-order"]


def test_commits_from_before_a_start_over_are_no_longer_asked_for() -> None:
    """But those after it are."""
    trace = replace(
        sound(),
        lines=[resume(1, None), resume(2, None), resume(3, f"{1:08d}-g0002-{2:016x}")],
        events=[
            event(0, "i-1", "take-over", generation=1),
            event(60, "i-1", "committed", step=3),
            event(120, "i-2", "take-over", generation=2),
            event(121, "i-2", "none-valid", starts_over=True),
            event(150, "i-2", "committed", step=1),
        ],
    )
    assert not [why for why in broken_rules(trace) if "commits-kept" in why]
    more = replace(trace, events=[*trace.events, event(160, "i-2", "committed", step=2)])
    assert "commits-kept: generation 3 began with step 1; 2 was committed before" in broken_rules(
        more
    )


def test_a_clock_that_jumped_back_gives_an_attempts_commit_to_no_other() -> None:
    """Its events come before its take-over, in the life of the machine's attempt before."""
    trace, commit = sound(), event(90, "i-1", "committed", step=4, generation=2)
    mixed = replace(trace, events=[*trace.events[:2], commit, *trace.events[2:]])
    assert not [why for why in broken_rules(mixed) if "commits-kept" in why]


@pytest.mark.parametrize(
    ("older", "rule", "lacks"),
    [
        (
            lambda t: replace(t, heads=()),
            "one-writer",
            "no past of the head is kept here, only its present",
        ),
        (
            lambda t: replace(t, heads=t.heads[2:]),
            "generations-in-order",
            "the head's past before generation 2 has expired",
        ),
        (
            lambda t: _lines(t, lambda lines: [line.pop("ids_sum", 0) for line in lines]),
            "samples-once",
            "no digests of samples: a program's are its own, an older version wrote none",
        ),
        (
            lambda t: replace(t, config={"origin": {"epochs": 9}}),
            "samples-once",
            "it extends another run, whose record has its first steps",
        ),
        (
            lambda t: replace(t, damaged=["metrics/x: damaged"]),
            "samples-once",
            "it cannot be read in full: metrics/x: damaged",
        ),
        (
            lambda t: replace(t, ledger={}),
            "within-limits",
            "no Guard kept its limits beside the run",
        ),
        (
            lambda t: replace(t, head={**t.head, "state": "released"}),
            "nothing-after-the-end",
            "it has not ended: it is released",
        ),
        (
            _taken,
            "notices-answered",
            "generation 2 had a notice of 5 s, and was not heard of again: perhaps taken sooner",
        ),
    ],
)
def test_a_rule_says_what_it_lacks(
    older: Callable[[RunTrace], RunTrace], rule: str, lacks: str
) -> None:
    (found,) = [each for each in verify(older(sound())) if each.rule == rule]
    assert (found.word, list(found.lacks)) == ("in part", [lacks])

"""The rules that a run's trace keeps (docs/how-it-works.md), each by its name, and what broke one.

Pure: a trace comes from a store or is made in memory, by a simulation. A rule says what it lacks to
judge - an older version wrote less, a folder keeps no past - and takes that for no promise kept.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import mul

from contract.keys import checkpoint_prefix, generation_in
from contract.lineage import Line, newest_by_step
from contract.notice import last_save_margin
from contract.samples import lineage_problems
from contract.trace import RunTrace

_ENDED = ("finished", "failed")
# What an attempt says next after a notice: one that had nothing to commit, ends.
_ANSWERS = ("committed", "save-failed", "released", *_ENDED)
# S3 tells whole seconds, and EC2's clock is not S3's.
_CLOCKS_DIFFER_SECONDS = 60.0
# From one call of the Guard to the next and for two notices, where its ledger does not say.
_TICK_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One rule's: what breaks it, and what there is too little of to judge more."""

    rule: str
    promise: str
    broken: Sequence[str]
    lacks: Sequence[str]

    @property
    def word(self) -> str:
        """Broken, kept, or kept in part: as far as can be told."""
        return "broken" if self.broken else "in part" if self.lacks else "kept"


def verify(trace: RunTrace) -> list[Verdict]:
    """Judge a trace by every rule."""
    found = []
    for rule, check in RULES.items():
        lacks: list[str] = []
        try:
            broken = list(check(trace, lacks))
        except (KeyError, TypeError, AttributeError) as error:  # of another version
            broken, lacks = [], [f"its record has another form ({type(error).__name__}: {error})"]
        promise = check.__doc__ or ""
        found.append(Verdict(rule=rule, promise=promise, broken=broken, lacks=lacks))
    return found


def broken_rules(trace: RunTrace) -> list[str]:
    """Return what the trace breaks, each after its rule's name; empty for a sound run."""
    return [f"{each.rule}: {why}" for each in verify(trace) for why in each.broken]


def _one_writer(trace: RunTrace, lacks: list[str]) -> Iterator[str]:
    """One writer at a time: each generation is one machine's, and commits only while it holds."""
    taken = [(life[0]["generation"], "") for life in _lives(trace)]
    for what, writers in (("take-overs", taken), ("writers of metrics", trace.writers)):
        for generation, count in Counter(each for each, _ in writers).items():
            if count > 1:
                yield f"generation {generation} has {count} {what}"
    for before, after in _pairs(trace, lacks):
        own = after["generation"]
        if own == before["generation"] and after["writer"] != before["writer"]:
            yield f"{after['writer']} wrote the head of {before['writer']}, in generation {own}"
        for name in _names(after) - _names(before):
            if generation_in(name) not in (0, own):
                yield f"{name} was committed while generation {own} held the lease"


def _samples(trace: RunTrace, lacks: list[str]) -> Iterator[str]:
    """Each sample once per epoch: in the lineage, steps counted once, the newest winning."""
    origin = trace.config.get("origin") or {}
    if trace.damaged:
        lacks.append(f"it cannot be read in full: {trace.damaged[0]}")
    elif origin.get("epochs") or origin.get("steps"):
        lacks.append("it extends another run, whose record has its first steps")
    elif steps := _lineage(trace):
        yield from lineage_problems(steps)
    else:
        lacks.append("no digests of samples: a program's are its own, an older version wrote none")


def _commits(trace: RunTrace, lacks: list[str]) -> Iterator[str]:
    """No step is lost that a commit held: an attempt goes on from the newest valid commit."""
    # An event's own generation, where it has one: a clock that jumps back mixes up the lives.
    commits = [
        (event.get("generation", life[0]["generation"]), event["step"])
        for life in _lives(trace)
        for event in life
        if event["name"] == "committed"
    ]
    excused = {*map(_step, _given_up(trace))}
    for before, after in pairwise(_names(head) for _, head in trace.heads):
        # Retention keeps a program's whole snapshots, and forgets newer ones that may be torn.
        excused |= {_step(name) for name in before - after if name < max(after, default="")}
    starts_over = any(
        each.get("starts_over") or (each["name"] == "reopened" and not each.get("checkpoint"))
        for each in trace.events
    )
    first = dict[int, int]()
    for line in trace.lines:
        if line["kind"] == "step" and "ids_sum" in line:
            first.setdefault(line["generation"], line["step"])
    since = 0  # the generation that started over last
    for line in (each for each in trace.lines if each["kind"] == "resume"):
        own, name = line["generation"], line.get("checkpoint")
        since = since if name or not starts_over else own
        newest = max((s for g, s in commits if since <= g < own and s not in excused), default=0)
        begun = _step(name) if name else 0
        if begun < newest:
            yield f"generation {own} began with step {begun}; {newest} was committed before"
        if first.get(own, inf) <= begun:
            yield f"generation {own} repeated step {first[own]}, held by {name}"


def _generations(trace: RunTrace, lacks: list[str]) -> Iterator[str]:
    """Generations are in order: each take-over is one more, and later steps are no older one's."""
    newest, lives = trace.head["generation"], _lives(trace)
    last = max([line["generation"] for line in (*trace.lines, *(life[0] for life in lives))] or [0])
    if last > newest:
        yield f"generation {last} has written, but the head is of generation {newest}"
    for before, after in _pairs(trace, lacks):
        if after["generation"] - before["generation"] not in (0, 1):
            yield f"generation {after['generation']} followed {before['generation']}"
    for (_, before), (step, after) in pairwise(sorted(_lineage(trace).items())):
        if after["generation"] < before["generation"]:
            yield f"step {step} is generation {after['generation']}'s, after {before['generation']}"


def _deletions(trace: RunTrace, lacks: list[str]) -> Iterator[str]:
    """Files are deleted only after the head forgot them: what it names is there, and whole."""
    for entry in trace.head["checkpoints"] if trace.sizes is not None else ():
        for file in entry["files"]:
            key = checkpoint_prefix(entry["name"]) + file["name"]
            if (size := (trace.sizes or {}).get(key)) != file["bytes"]:
                yield f"the head names {file['bytes']} bytes of {key}, and {size or 0} are there"
    _pairs(trace, lacks)
    for (_, before), (when, after) in pairwise(trace.heads):
        for name in _names(before) - _names(after):
            if (early := int(when) - trace.deleted.get(name, inf)) > 0:
                yield f"{name} was deleted {early:.0f} s before the head forgot it"


def _notices(trace: RunTrace, lacks: list[str]) -> Iterator[str]:
    """A notice is answered in time: the state is committed before the machine is taken."""
    # One that a person restored was heard of when it was first written.
    written = {head.get("nonce", when): (when, head) for when, head in reversed(trace.heads)}
    for life in _lives(trace):
        names, own = [event["name"] for event in life], life[0]["generation"]
        if "notice" not in names:
            continue
        notice, after = life[names.index("notice")], life[names.index("notice") + 1 :]
        left, told = notice["seconds_left"], notice.get("stored") or 0.0
        answer = next((each for each in after if each["name"] in _ANSWERS), {})
        heads = [(when, h["state"]) for when, h in written.values() if h["generation"] == own]
        heard = max([when for when, _ in heads], default=told)
        ended = [when for when, state in heads if when > told - 1.0 and state in _ANSWERS]
        if not answer and ended:
            continue  # its event was lost, and its head says that it was there in time
        took, given = min([answer.get("stored") or 0.0, *ended]) - told, left
        # Heard at a boundary, late in the notice: `left` counts from there, not from its receipt.
        if "notice_seconds" in notice and "notice_to_commit_seconds" in answer:
            took, given = answer["notice_to_commit_seconds"], notice["notice_seconds"]
        where = f"generation {own} had a notice of {given:g} s"
        if answer.get("name") == "save-failed":
            lacks.append(f"{where}, and the store refused its save: {answer.get('message')}")
        elif answer and took > given + 1.0:  # S3 and EC2 tell whole seconds
            yield f"{where} and {answer['name']} after {took:.1f} s"
        elif not answer and heard - told > left - last_save_margin(left):
            yield f"{where}, lived that long and committed nothing"
        elif not answer:
            lacks.append(f"{where}, and was not heard of again: perhaps taken sooner")


def _limits(trace: RunTrace, lacks: list[str]) -> Iterator[str]:
    """Spending stays within the limits: to at most what one tick of the Guard costs."""
    attempts, limits = trace.ledger.get("attempts", {}).values(), trace.ledger.get("limits")
    if not limits:
        lacks.append("no Guard kept its limits beside the run")
        return
    tick, hours = limits["seconds"] / 3600, [(a["seen"] - a["launched"]) / 3600 for a in attempts]
    dearest = max((each["usd_per_hour"] for each in attempts), default=0.0)
    for name, billed, more in (
        ("usd", [each["usd"] for each in attempts], dearest * tick),
        ("hours", hours, tick),
    ):
        own = list(zip(attempts, billed, strict=True))
        # A deploy or a person may start one beyond the limit, which has a tick to be seen; where
        # its end is not, one more is billed.
        late = [usd for each, usd in own if _billed_by(each["launched"], own) > limits[name]]
        is_over = sum(billed) - sum(late) > limits[name] + more or max(late, default=0.0) > 2 * more
        if limits[name] and is_over:
            yield f"{sum(billed):.2f} {name} were billed, {limits[name]:g} allowed"


def _billed_by(when: float, attempts: Sequence[tuple[Line, float]]) -> float:
    """Return what machines had been billed by then, each evenly over its life."""
    lives = [(each["launched"], max(1.0, each["seen"] - each["launched"])) for each, _ in attempts]
    shares = [min(1.0, max(0.0, when - launched) / life) for launched, life in lives]
    return float(sum(map(mul, shares, (billed for _, billed in attempts))))


def _end(trace: RunTrace, lacks: list[str]) -> Iterator[str]:
    """Nothing runs after the end: a run that is over stays so, and its machines end."""
    for before, after in _pairs(trace, lacks):
        may_reopen = before["state"] == "failed" and after["state"] in ("failed", "released")
        if before["state"] in _ENDED and not may_reopen:
            yield f"the head became {after['state']} after it was {before['state']}"
    ends = [when for when, head in trace.heads if head["state"] in _ENDED]
    attempts = trace.ledger.get("attempts", {})
    if trace.head["state"] not in _ENDED:
        lacks.append(f"it has not ended: it is {trace.head['state']}")
    elif not attempts:
        lacks.append("no Guard saw its machines")
    patience = trace.ledger.get("limits", {}).get("seconds", _TICK_SECONDS) + _CLOCKS_DIFFER_SECONDS
    for machine, each in attempts.items() if trace.head["state"] in _ENDED and ends else ():
        # A deploy after the end starts one, which sees that the run is over (docs/deploy.md).
        if each["seen"] - max(ends[-1], each["launched"]) > patience:
            yield f"{machine} ran until {each['seen'] - ends[-1]:.0f} s after the end"
        elif each["is_live"]:
            lacks.append(f"{machine} still ran when the Guard last looked")


# The rules by name, in the order of docs/how-it-works.md.
RULES: Mapping[str, Callable[[RunTrace, list[str]], Iterator[str]]] = {
    "one-writer": _one_writer,
    "samples-once": _samples,
    "commits-kept": _commits,
    "generations-in-order": _generations,
    "deleted-after-forgotten": _deletions,
    "notices-answered": _notices,
    "within-limits": _limits,
    "nothing-after-the-end": _end,
}


def _lives(trace: RunTrace) -> list[list[Line]]:
    """Return each attempt's events: from a take-over on, those of the same machine."""
    now, found = dict[str, list[Line]](), []
    for event in (each for each in trace.events if each.get("source") == "trainer"):
        if event["name"] == "take-over":
            now[event["instance_id"]] = []
            found.append(now[event["instance_id"]])
        if event["instance_id"] in now:
            now[event["instance_id"]].append(event)
    return found


def _pairs(trace: RunTrace, lacks: list[str]) -> list[tuple[Line, Line]]:
    """Return each head with the next one; note what of the past is lacking."""
    heads = [head for _, head in trace.heads]
    if not heads:
        lacks.append("no past of the head is kept here, only its present")
    elif heads[0]["generation"] > 1:
        lacks.append(f"the head's past before generation {heads[0]['generation']} has expired")
    return list(pairwise(heads))


def _lineage(trace: RunTrace) -> dict[int, Line]:
    """Return the steps that count, with their digests: those of a commit, before the run ends.

    A commit that was given up may stay in the head, and no later step follows on it. Those that
    count are of the newest commit's generation, of that whose commit it resumed from, and so on.
    """
    given_up = {*_given_up(trace)}
    held = [
        (entry["step"], entry["name"])
        for entry in trace.head["checkpoints"]
        if entry["name"] not in given_up and not entry.get("is_left_behind")
    ]
    most, newest = max(held, default=(0, ""))
    generation = generation_in(newest) or trace.head["generation"]
    if trace.head["state"] == "finished":
        most, generation = inf, trace.head["generation"]
    resumed = {
        line["generation"]: generation_in(line.get("checkpoint") or "")
        for line in trace.lines
        if line["kind"] == "resume"
    }
    counted = set[int]()
    while generation > 0 and generation not in counted:
        counted.add(generation)
        generation = resumed.get(generation, generation - 1)
    lines = (line for line in trace.lines if line["generation"] in counted)
    steps = newest_by_step(lines, "step")
    if not all("ids_sum" in line for line in steps.values()):
        return {}
    return {step: line for step, line in steps.items() if step <= most}


def _given_up(trace: RunTrace) -> Iterator[str]:
    """Yield the commits that were damaged, or that a person or a failed start gave up."""
    for each in (*trace.events, *trace.lines):
        yield from (entry["name"] for entry in each.get("passed_over") or ())
        yield from each.get("dropped") or ()
        if each.get("name") == "failed-start":
            yield each["snapshot"]


def _names(head: Line) -> set[str]:
    return {str(entry["name"]) for entry in head["checkpoints"]}


def _step(name: str) -> int:
    """Return the step, or a program's number, with which a checkpoint's name begins."""
    return int(name.partition("-")[0])

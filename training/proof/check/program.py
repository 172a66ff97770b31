"""`check --program`: what interruptions change in a program that knows nothing of this project.

It runs twice to its end. Then, on a store with faults, it is killed, noticed and shut down at drawn
moments, most of them inside a save; each attempt is a new process with a new root, and has nothing
but the run's store. What was found becomes a certificate (contract/certificate.py).
"""

import argparse
import json
import math
import random
import re
import statistics
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NoReturn

from contract.certificate import Certificate
from contract.errors import Exit, UserError
from contract.keys import RECEIPT
from contract.source import CERTIFICATE, source_sha256
from training.durable import Events, History, RunConfig, open_store
from training.proof.check.lives import Account, ExitKind, Lives, Report, recorded
from training.proof.experiment import Difference, ProgramRun, difference, losses_by_step
from training.proof.injector import StatusFile

_FAULT_RATE = 0.04  # the share of the store's answers
# An interruption is looked for up to this share of the run after a start, and then for so long.
_LATEST, _SPAN = 0.8, 10.0
# How often as long as the uninterrupted run an attempt may take.
_MOST_TIMES, _LEAST_SECONDS = 5, 300.0
_OVER = re.compile(r"^\[program\] [0-9]+ final files", re.MULTILINE)
_STARTED = "[program] started as process "
_OWN_LINE = re.compile(
    r"(?!\[(checkpoint|fault|log|notice|ok|program|restore|snapshot)\] |error: )"
)
# So few steps or lines show nothing; of the lines from where a life goes on, so many must follow.
_FEW, _CONTIGUOUS = 3, 0.8
# What a bound has more than the longest time that was seen.
_MARGIN = 1.25
# How much more than its snapshot's age a restart may seem to lose: or a quarter of the run, as what
# was written last may be a status file, beside a checkpoint.
_SLACK_SECONDS = 3.0
_WORDS: Mapping[ExitKind, str] = {"kill": "kills", "notice": "notices", "shutdown": "SIGTERMs"}
# Each rule of when a snapshot is taken: the habit that it is for, and the rule.
_RULES = {
    "commit": "it calls commit(), which is when a snapshot is taken",
    "quiet": "it pauses after its saves: a snapshot after {0:g} s without a change",
    "pattern": "its saves write the same files: a snapshot after a fifth of {0:g} s without change",
    "appended": "it only appends: its files are kept as they grow, at most every {0:g} s",
    "replacing": "it replaces complete files: it is stopped for a snapshot every {0:g} s",
    "restless": "it pauses too rarely, or keeps a file open: it is stopped for a snapshot, at most "
    "every 12 times {0:g} s or 120 s",
}
_OF_RUN = (
    *("program", "program_file", "source", "dataset_uri", "working_folder", "interpreter"),
    *("notice_signal", "quiet_seconds", "hyperparameter", "env", "channel", "metric"),
)


class _Course:
    """What a program shows of where it is: its steps, or else lines that it prints once."""

    def __init__(self, log: Path) -> None:
        """Learn it from an uninterrupted life's log, and the metrics beside it."""
        *_, ended = recorded(log.with_name("metrics.jsonl"), "exit_code")
        steps, lines = set(_steps(log)), _lines(log)
        once = [line for line, count in Counter(lines).items() if count == 1 and line.strip()]
        has_steps = len(steps) >= _FEW
        self._lines = {} if has_steps else {line: number for number, line in enumerate(once, 1)}
        self.last = max(steps) if has_steps else len(once) if len(once) >= _FEW else 0
        self.seconds = float(ended["seconds"])

    def reports(self, log: Path) -> list[Report]:
        """Return a life as a program that reports would tell it, at its usual pace."""
        done = self._done(log) if self.last else []
        told: list[Report] = [{"at": n * self.seconds / self.last, "step": n} for n in done]
        is_over = _OVER.search(log.read_text(errors="replace")) is not None
        return [*told, {"at": told[-1]["at"] if told else 0.0, "final": ""}] if is_over else told

    def _done(self, log: Path) -> list[int]:
        if not self._lines:
            seen = getattr(self, "_seen", 0)
            steps = list(_steps(log))
            self._seen = len(steps)
            return steps[seen:]
        found = [self._lines[line] for line in _lines(log) if line in self._lines]
        for first in found:  # what is printed at each start is not followed by the next lines
            rest = {number for number in found if number >= first}
            if len(rest) >= _CONTIGUOUS * (max(found) - first + 1):
                # A life that ended soon may have printed only what each start prints.
                is_start = first == min(found) and max(found) < max(_FEW, self.last / 10)
                return [] if is_start else [number for number in found if number >= first]
        return []


def _steps(log: Path) -> Iterator[int]:
    for record in recorded(log.with_name("metrics.jsonl"), "at"):
        if record["at"] is not None:
            yield int(record["at"])


def _lines(log: Path) -> list[str]:
    """Return what the program itself has printed."""
    own = log.read_text(errors="replace").partition(_STARTED)[2].splitlines()[1:]
    return [line for line in own if _OWN_LINE.match(line)]


class _ProgramRun:
    """A run of the program in a folder, under the options of `run` that were given."""

    def __init__(self, options: argparse.Namespace, folder: Path, **lives: Any) -> None:
        given = [*_given(options), f"--notice-budget-seconds={Lives.NOTICE_SECONDS}"]
        # All runs have the same paths, as what a program saves may contain them.
        machine = folder.with_name("machine")
        self.lives = Lives(folder=folder, options=given, first=_STARTED, machine=machine, **lives)
        self.store, self.faults = open_store(self.lives.run_uri), folder / "faults"

    def finish(self) -> ProgramRun:
        """Run it to its end."""
        code = self.lives.live()
        if code != Exit.FINISHED:
            self._fail(code, "without any interruption" if self.lives.number == 1 else "at its end")
        return self.result()

    def killed(self, hows: Sequence[ExitKind], rng: random.Random, span: float) -> Account:
        """Run it to its end on a store with faults, with these interruptions."""
        self.lives.trainer = "training.proof.check.faulty_folder"
        self.lives.environment |= {"FAULTS": str(self.faults), "FAULT_RATE": str(_FAULT_RATE)}
        account = self.lives.killed(*hows, answers=[""] * len(hows), rng=rng, span=span)
        if account.never_back:
            self._fail(account.never_back[0].rpartition(" ")[2], "after an interruption")
        self.lives.trainer = "training"  # reading all of a run's history would meet a fault
        self.finish()
        return account

    def result(self) -> ProgramRun:
        """Return what the finished run has left."""
        found = self.store.get(RECEIPT)
        assert found is not None, "a finished run has a receipt"
        receipt = json.loads(found.data)
        return ProgramRun(
            losses=losses_by_step(History.read(self.store).lines),
            files={**receipt["final_files"], **receipt.get("checkpoint_files", {})},
            interruptions=receipt["interruptions"],
            seconds=receipt["seconds"],
            num_snapshots=receipt["snapshots"],
        )

    def exposures(self) -> Iterator[tuple[int, float]]:
        """Yield each life's times without a snapshot of the work, its last one last, in seconds."""
        commits = Events.read(self.store, "committed")
        for began in Events.read(self.store, "take-over"):
            safe, writer = _unix(began), began["instance_id"]
            number = int(writer.rpartition("-")[2])
            for event in commits:
                if event["instance_id"] == writer:
                    yield number, _unix(event) - safe
                    safe = max(safe, event["written_at"])
            yield number, self.lives.ended[number - 1] - safe

    def ages(self, account: Account) -> Iterator[float]:
        """Yield for each loss of the account how old its newest snapshot was, in seconds."""
        last, before = dict(self.exposures()), 0
        for until in account.lives:
            # A life that showed nothing is lost with the next.
            yield sum(last.get(number, 0.0) for number in range(before + 1, until + 1))
            before = until

    def _fail(self, code: object, when: str) -> NoReturn:
        lines = self.lives.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        message = (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")
        if code == Exit.USER:
            raise UserError(message)
        raise UserError(f"the program failed {when} (exit code {code}): {message}")


def _unix(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def _given(options: argparse.Namespace) -> Iterator[str]:
    """Yield the options of `run` among those of `check`, as they were given."""
    for name in _OF_RUN:
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value not in (None, ""):
                yield f"--{name.replace('_', '-')}={value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Findings:
    """What an uninterrupted run, another one, and those with interruptions have shown."""

    whole: ProgramRun
    own: Difference  # of the first two
    interrupted: ProgramRun
    found: Difference  # of that
    hows: Sequence[ExitKind]  # that happened
    num_planned: int
    accounts: Sequence[Account]
    commits: Sequence[Mapping[str, Any]]  # events of all runs
    exposure: float  # the most seconds without a snapshot of the work
    ages: Sequence[float]  # of the newest snapshot, by loss
    num_faults: int

    @classmethod
    def of(
        cls,
        whole: ProgramRun,
        own: Difference,
        runs: Sequence[_ProgramRun],
        accounts: Sequence[Account],
        ends: Sequence[ProgramRun],
        hows: Sequence[ExitKind],
        num_planned: int,
    ) -> "_Findings":
        """Compile what the runs have shown, the first two of them uninterrupted."""
        worst = next((one for one in ends if not difference(one, whole).is_none), ends[-1])
        pairs = zip(runs[2:], accounts, strict=True)
        return cls(
            whole=whole,
            own=own,
            interrupted=worst,
            found=difference(worst, whole),
            hows=hows,
            num_planned=num_planned,
            accounts=accounts,
            commits=[event for run in runs for event in Events.read(run.store, "committed")],
            exposure=max(seconds for run in runs for _, seconds in run.exposures()),
            ages=[age for run, account in pairs for age in run.ages(account)],
            num_faults=sum(StatusFile(run.faults).num_faults for run in runs[2:]),
        )

    def certificate(self, config: Mapping[str, Any]) -> Certificate:
        """Return it; `config` has the program and the checksum of its code."""
        reason, rows = self._objection(), dict(self._rows(config["quiet_seconds"]))
        return Certificate(
            is_good=not reason,
            summary=reason or f"at most {rows['lost at most']}; bits {rows['bits']}",
            rows=rows,
            code_sha256=config["source_sha256"],
            program={n: v for n, v in config.items() if n not in ("source_sha256", "certificate")},
            certified_on=datetime.now(UTC).date().isoformat(),
            version=_version(),
        )

    @property
    def _costs_all(self) -> bool:
        """Whether there was never anything to resume from while it ran."""
        return all(event["reason"] in ("exit", "notice") for event in self.commits)

    @property
    def _redone(self) -> list[float]:
        return [seconds for account in self.accounts for seconds in account.lost]

    @property
    def _lost(self) -> list[float]:
        """Seconds of work, by loss: what was done again, and at least what no snapshot had."""
        return [*map(max, self._redone, self.ages)]

    @property
    def _goes_back(self) -> bool:
        """Whether it went on from less than was saved, and no start had failed."""
        slack, failed = (
            max(_SLACK_SECONDS, self.whole.seconds / 4),
            any(a.torn for a in self.accounts),
        )
        pairs = zip(self._redone, self.ages, strict=True)
        return not failed and any(lost > _MARGIN * age + slack for lost, age in pairs)

    def _objection(self) -> str:
        """Return what stands against a certificate."""
        if self._costs_all:
            return (
                "an interruption costs all, as no snapshot was taken while it ran; call commit() "
                "after each save, save to new files and rename them, or lower --quiet-seconds "
                "(docs/your-script.md)"
            )
        if self._goes_back:
            redone = max(number for account in self.accounts for number in account.redone)
            return (
                f"it goes on from less than it has saved: {redone} of its steps or lines were "
                f"done again, about {max(self._redone):.0f} s, though its snapshots were "
                f"{statistics.mean(self.ages):.0f} s old on average; see which file it loads (by "
                "name, ckpt_9 is after ckpt_10)"
            )
        if self.found.is_none:
            return ""
        why = "two uninterrupted runs differ as well: seed it first, then check again"
        if self.own.is_none:
            why = "its checkpoint lacks something, such as random states or the place in the epoch "
            why += "(docs/port.md)"
        return f"interrupted, it ends differently: {_compared(self.found)}; {why}"

    def _rows(self, quiet_seconds: float) -> Iterator[tuple[str, str]]:
        lost, most = self._lost, max([self.exposure, *self._lost])
        bound = f"{math.ceil(_MARGIN * most)} s of work, with saves as far apart as here"
        no_bound = f"all since the start: no bound is known, and {most:.0f} s were seen"
        yield "lost at most", no_bound if self._costs_all or self._goes_back else bound
        mean = f"{statistics.mean(lost):.1f} s" if lost else "not known"
        yield "on average", f"{mean}, in {len(lost)} interruptions"
        yield "bits", self._bits()
        counts = [f"{number} {_WORDS[how]}" for how, number in Counter(self.hows).items()]
        failed = sum(len(account.torn) for account in self.accounts)
        more = f", {failed} starts that failed before one went on" if failed else ""
        faults = f"{self.num_faults} faults of its store"
        yield "interruptions", f"{', '.join(counts)}, most in a save; {faults}{more}"
        rule = self._rule(quiet_seconds)
        yield "habit", _RULES.get(rule, rule).format(quiet_seconds)
        less = "saving more often" if rule == "commit" else "commit() after each save: one save"
        yield "would lose less", less
        yield "not tried", "; ".join(self._untried())

    def _bits(self) -> str:
        if not (self.own.is_none and self.found.is_none):
            who = "interrupted" if self.own.is_none else "two uninterrupted runs, too"
            return f"differ ({who}): {_compared(self.found if self.own.is_none else self.own)}"
        num_files, losses = len(self.whole.files), self.whole.losses.keys()
        # A machine may die before it reports a loss.
        num_losses = len(losses & self.interrupted.losses.keys())
        told = f"{num_losses} losses equal, as printed" if num_losses else "it reports no losses"
        files = f"equal in {num_files} files" if num_files else "not compared, as it leaves no file"
        return f"{files}; {told}"

    def _rule(self, quiet_seconds: float) -> str:
        """Return the rule by which most snapshots were taken, from their events."""
        rules, stops = Counter[str](), dict[str, float]()
        for event in self.commits:
            rule, name = event["reason"], event["instance_id"]
            if rule == "quiet":
                age = _unix(event) - event["seconds"] - event["written_at"]
                rule = "quiet" if age > 0.9 * quiet_seconds else "pattern"
            elif rule == "crash-consistent":
                pause, stops[name] = _unix(event) - stops.get(name, -math.inf), _unix(event)
                rule = "replacing" if pause < 3 * quiet_seconds else "restless"
            rules[rule] += event["reason"] not in ("exit", "notice")
        (rule, number), *_ = [*rules.most_common(1), ("", 0)]
        return rule if number else "none was recognized: it was only saved at an end"

    def _untried(self) -> Iterator[str]:
        if (missing := self.num_planned - len(self.hows)) > 0:
            yield f"{missing} of {self.num_planned} interruptions, as it ended before"
        if not self._lost:
            yield "what a restart reads, as it prints nothing that shows where it goes on"
        if not Path("/dev/nvidiactl").exists():
            yield "a GPU"
        yield f"S3; two minutes' notice (here {Lives.NOTICE_SECONDS:g} s); several machines"


def _version() -> str:
    """Return the project's version, and the checksum of what saves a program."""
    room = Path(__file__).parents[2]
    project = tomllib.loads((room.parent / "pyproject.toml").read_text(encoding="utf-8"))
    return f"{project['project']['version']} ({source_sha256(room / 'durable')[:8]})"


def check_program(options: argparse.Namespace) -> int:
    """Run the program to its end again and again, and compare; exit code 1: not certified."""
    if options.name is not None:
        raise UserError(f"got both {options.name!r} and a program; check one at a time")

    def say(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        findings, config = _played(options, Path(folder), say)
    certificate = findings.certificate(config)
    if options.json:
        told = {
            "is_equal": findings.found.is_none,
            "uninterrupted": asdict(findings.whole),
            "interrupted": asdict(findings.interrupted),
            "difference_of_two_uninterrupted": asdict(findings.own),
            "difference": asdict(findings.found),
            "certificate": asdict(certificate),
        }
        print(json.dumps(told, indent=1))
    _keep(certificate, options.source, say)
    return Exit.FINISHED if certificate.is_good else Exit.FAILED


def _played(
    options: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> tuple[_Findings, Mapping[str, Any]]:
    """Play the program; return what was found, and its config.json's config."""
    runs = [_ProgramRun(options, folder / name) for name in ("whole", "again")]
    whole, log = runs[0].finish(), runs[0].lives.log
    if not whole.num_snapshots:
        raise UserError(
            "the program saved nothing to its checkpoint folder, so each interruption loses "
            "everything; save to $SM_CHECKPOINT_DIR, and load from there at the start"
        )
    say(
        f"[ok] uninterrupted: {len(whole.losses)} losses, {whole.num_snapshots} snapshots, "
        f"{len(whole.files)} final files, {whole.seconds:.0f} s"
    )
    own = difference(runs[1].finish(), whole)
    say(f"{'[ok]' if own.is_none else '[note]'} once more: {_compared(own)}")
    hows = [*islice(cycle(Lives.EXITS), options.kills * len(Lives.EXITS))]
    wait, rng = _LATEST * _Course(log).seconds, random.Random(1)
    say(f"[check] now {len(hows)} interruptions, each up to {wait:.0f} s after a start")
    accounts, ends = list[Account](), list[ProgramRun]()
    lives = {"limit_seconds": max(_LEAST_SECONDS, _MOST_TIMES * whole.seconds), "say": say}
    while (num := sum(one.kills for one in accounts)) < len(hows):
        if accounts and not accounts[-1].kills:
            break  # it is too short
        lives |= {"reporter": _Course(log).reports, "wait_seconds": wait}
        runs.append(_ProgramRun(options, folder / f"killed-{len(ends)}", **lives))
        accounts.append(runs[-1].killed(hows[num:], rng, min(_SPAN, wait / 6)))
        ends.append(runs[-1].result())
    record = RunConfig.read(runs[0].store)
    if not num or record is None:
        raise UserError(
            "the program ended each time before it could be interrupted, so nothing was tested; "
            "let it train longer"
        )
    return _Findings.of(whole, own, runs, accounts, ends, hows[:num], len(hows)), record.config


def _keep(certificate: Certificate, source: Path, say: Callable[[str], None]) -> None:
    """Show the certificate, and keep it in the program's folder, unless that has changed."""
    for name, text in certificate.rows.items():
        say(f"  {name + ':':17}{text}")
    verdict = "[ok] certified" if certificate.is_good else "[failed] not certified"
    say(f"{verdict}: {certificate.summary}")
    if certificate.code_sha256 != source_sha256(source):
        raise UserError(f"{source} changed during the check; check it again")
    try:
        certificate.write(source)
        say(f"  kept as {source / CERTIFICATE}")
    except OSError as error:
        say(f"[note] the certificate is not kept in {source}: {error.strerror}")


def _compared(found: Difference) -> str:
    if found.is_none:
        return "the same losses and final files"
    words = []
    if found.steps:
        words.append(
            f"{len(found.steps)} losses differ, from step {found.steps[0]} on, "
            f"by up to {found.largest:.4g}"
        )
    if found.files:
        more = f" and {len(found.files) - 5} more" if found.files[5:] else ""
        words.append(f"other files: {', '.join(found.files[:5])}{more}")
    return "; ".join(words)

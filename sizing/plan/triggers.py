"""The seed's triggers for another size, as rules: which fired, on what evidence, and is it true?

The thresholds stand in sizing/plan/rules.json (or a file of your own); each rule that fires is held
against what the models say, because several of the seed's triggers name the wrong cure.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sizing.models.host import host_memory
from sizing.plan.plan import Plan

RULES_FILE = Path(__file__).with_name("rules.json")
# Signals that no plan knows: given by the user, or by a measured run.
GIVEN = ("parallel_jobs", "researchers", "gpu_utilization_percent", "data_wait_percent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Fires when its signal is at least (or at most) a threshold."""

    name: str
    signal: str
    consider: str
    seed: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"rule {self.name!r} needs either at_least or at_most")

    def fires(self, value: float) -> bool:
        """Whether `value` is beyond the threshold."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most

    @property
    def condition(self) -> str:
        """The rule for people."""
        if self.at_least is not None:
            return f"{self.signal} >= {self.at_least:g}"
        return f"{self.signal} <= {self.at_most:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A rule that fired, the evidence, and what the models say to it."""

    rule: Rule
    value: float
    origin: str
    verdict: str


def load_rules(path: Path = RULES_FILE) -> list[Rule]:
    """Read rules; what is none is a ValueError that says which."""
    try:
        found = [Rule(**rule) for rule in json.loads(path.read_text(encoding="utf-8"))["rules"]]
    except FileNotFoundError:
        raise ValueError(f"there is no rules file {path}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as rules ({error}); see {RULES_FILE}") from error
    known = [*_from_plan_names(), *GIVEN]
    for rule in found:
        if rule.signal not in known:
            near = difflib.get_close_matches(rule.signal, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"rule {rule.name!r}: signal {rule.signal!r} is unknown; {hint}")
    return found


def _from_plan_names() -> tuple[str, ...]:
    return (
        "dataset_samples",
        "batch_size",
        "hours_per_experiment",
        "model_mb",
        "gpu_memory_percent",
        "host_memory_percent",
        "spot_saving_percent",
    )


def signals(plan: Plan) -> dict[str, float]:
    """What the plan knows of the rules' signals."""
    stage = plan.work.main.footprint
    saving = 0.0
    if plan.spot is not None and plan.usd_on_demand:
        saving = 100 * (1 - (plan.spot.usd_p50 or 0.0) / plan.usd_on_demand)
    values = (
        float(max(s.footprint.samples_per_epoch for s in plan.work.stages)),
        float(stage.global_batch),
        plan.hours_on_demand,
        stage.parameter_bytes / 1e6,
        100 * plan.work.memory.need / plan.inputs.instance.gpu_memory_mib,
        100 * plan.host.need / plan.inputs.instance.memory_gib,
        saving,
    )
    return dict(zip(_from_plan_names(), values, strict=True))


def fire(
    plan: Plan, rules: list[Rule], given: Mapping[str, float], origin: str = "given"
) -> list[Fired]:
    """Return the rules that fire on the plan's signals, given ones first."""
    known = [*_from_plan_names(), *GIVEN]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"signal {name!r} is unknown; {hint}")
    values = {name: (value, "predicted") for name, value in signals(plan).items()}
    values |= {name: (value, origin) for name, value in given.items()}
    return [
        Fired(rule=rule, value=value, origin=where, verdict=_verdict(rule, value, plan))
        for rule in rules
        if rule.signal in values
        for value, where in [values[rule.signal]]
        if rule.fires(value)
    ]


def _verdict(rule: Rule, value: float, plan: Plan) -> str:
    """What the models say to the rule's advice."""
    instance = plan.inputs.instance
    if rule.signal in ("batch_size", "model_mb"):
        return (
            f"no: a larger size of the family has the same {instance.gpu}; memory is "
            f"{plan.work.memory.need:,.0f} of {instance.gpu_memory_mib:,} MiB"
        )
    if rule.signal == "dataset_samples":
        gib = plan.inputs.dataset_bytes / 2**30
        cached = gib <= plan.host.cache_bytes / 2**30
        return (
            f"{'no' if cached else 'yes'}: bytes decide, not samples; {gib:.1f} GiB "
            f"{'fit' if cached else 'do not fit'} the page cache of {instance.size}"
        )
    if rule.signal == "hours_per_experiment":
        data_bound = plan.work.main.bound_by in ("loader CPU", "disk")
        return (
            f"{'yes' if data_bound else 'no'}: the run is bound by {plan.work.main.bound_by}, "
            f"{'which' if data_bound else 'not what'} more vCPUs and EBS bandwidth relieve"
            f"{'' if data_bound else '; a faster GPU would'}"
        )
    if rule.signal in ("parallel_jobs", "researchers"):
        runs = host_memory(instance, plan.inputs.constants, runs=max(1, int(value)))
        return (
            f"{'no' if runs.fits else 'yes'}: with memory-mapped data {runs.sentence()}; the runs "
            "share the GPU, so each takes as many times longer (`plan --runs N`)"
        )
    if rule.signal == "data_wait_percent":
        return f"yes: the step waits for its data; {instance.vcpus} vCPUs feed it now"
    if rule.signal in ("gpu_memory_percent", "gpu_utilization_percent"):
        return "see the ranking: the cheapest size that fits comes first"
    return "see the figures of `python -m sizing plan`"

"""Triggers for another size, as rules: which fired, their evidence, whether the advice would help.

The thresholds are in rules.json next to this file. Each rule that fires is checked against the
models, because several common rules name the wrong remedy.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from contract.suggestion import suggest
from sizing.catalogue.gpus import find_gpu
from sizing.models.constants import GIB, MIB
from sizing.models.footprints import trained_samples
from sizing.models.host import host_memory
from sizing.plan.checks import sizes_with
from sizing.plan.plan_inputs import Request
from sizing.plan.side_by_side import ways
from sizing.plan.size_plan import Plan
from sizing.plan.spot_verdict import saving_percent, spot_verdict

_RULES_FILE = Path(__file__).with_name("rules.json")
# Parameters, gradients and two states of AdamW, relative to the parameters.
_COPIES = 4


def _dataset(plan: Plan, samples: float) -> str:
    facts = plan.inputs.facts
    if facts is None:
        return "unknown: the size of its data is not known; add --dataset-gib"
    gib = samples * facts.epoch_bytes_per_sample / GIB
    cache = plan.host.cache_bytes / GIB
    cached = gib <= cache
    # The plan already has this many samples if they were given.
    hours = plan.work.seconds / 3600 * samples / trained_samples(plan.inputs.footprints)
    return (
        f"{'no' if cached else 'yes'}: bytes decide, not samples; {gib:.1f} GiB an epoch "
        f"{'fit' if cached else 'do not fit'} the {cache:.1f} GiB page cache of "
        f"{plan.request.size}; the work takes {hours:.2g} h"
    )


def _preparing(plan: Plan, gib: float) -> str:
    each = plan.inputs.price.usd_per_hour
    return (
        f"yes, to prepare it, never to train: reading {gib:,.0f} GiB takes "
        f"{gib * GIB / 1e6 / plan.inputs.volume.baseline / 60:.0f} min of a volume, and a GPU at "
        f"${each:.2f} an hour would wait; `select --phase prepare` has the sizes"
    )


def _grant(plan: Plan, usd: float) -> str:
    spot = f", {usd / plan.spot.usd_p50:,.1f} on Spot (p50)" if plan.spot else ""
    return (
        f"for time only: ${usd:,.0f} pay for {usd / plan.usd_on_demand:,.1f} runs on demand"
        f"{spot}; `advise --max-usd {usd:g} --objective hours` has the fastest that they pay for"
    )


def _batch(plan: Plan, size: float) -> str:
    instance = plan.inputs.instance
    return (
        f"no: a larger size of the family has the same {instance.gpu}; a batch of {size:,.0f} "
        f"takes {plan.gpu_memory_need:,.0f} of its {instance.gpu_memory_mib:,} MiB (micro-batch "
        f"{plan.work.main.footprint.micro_batch})"
    )


def _model(plan: Plan, megabytes: float) -> str:
    instance, footprint = plan.inputs.instance, plan.work.main.footprint
    more = (megabytes * 1e6 - footprint.parameter_bytes) * _COPIES / MIB
    need = max(0.0, plan.gpu_memory_need + more)
    if need <= instance.gpu_memory_mib:
        return (
            f"no: {megabytes:,.0f} MB of parameters need {need:,.0f} MiB with AdamW (activations "
            f"unchanged) of {instance.gpu_memory_mib:,}, and a larger size has the same GPU"
        )
    cheapest = _cheapest_with(plan, need)
    return f"yes, but a larger GPU, not a larger size: {cheapest} for {need:,.0f} MiB"


def _cheapest_with(plan: Plan, need_mib: float) -> str:
    return next((i.size for i in sizes_with(plan, need_mib)), "no size in the catalogue")


def _hours(plan: Plan, hours: float) -> str:
    bound = plan.work.main.bound_by
    data_bound = bound in ("loader CPU", "disk")
    usd = hours * plan.inputs.price.usd_per_hour
    each = plan.spot.interruptions / plan.hours_on_demand if plan.spot else 0.0
    relief = "; a faster GPU would"
    if bound == "kernel launches":
        relief = "; nor does a faster GPU: fewer launches do, in larger micro-batches or compiled"
    return (
        f"{'yes' if data_bound else 'no'}: the run is bound by {bound}, "
        f"{'which' if data_bound else 'not by what'} more vCPUs and EBS bandwidth relieve"
        f"{'' if data_bound else relief}; {hours:.3g} h cost ${usd:.2f} on demand, "
        f"and Spot would interrupt them {hours * each:.2g} times"
    )


def _jobs(plan: Plan, jobs: float) -> str:
    runs = max(1, int(jobs))
    host = host_memory(plan.inputs.instance, plan.inputs.constants, runs=runs)
    sentence = f"{'no' if host.fits else 'yes'}: with memory-mapped data {host.sentence()}"
    workable = [
        f"{way.what} on {way.size} {way.hours:.2g} h and ${way.usd:.2f}"
        for way in ways(plan, runs)
        if way.problem is None
    ]
    return f"{sentence}; {', '.join(workable)}" if workable else sentence


def _gpu_memory(plan: Plan, percent: float) -> str:
    instance = plan.inputs.instance
    mib = instance.gpu_memory_mib * percent / 100
    cheapest = _cheapest_with(plan, mib)
    if cheapest == plan.request.size:
        return f"no: {mib:,.0f} MiB in use, and {cheapest} is the cheapest that has them"
    return f"yes: {mib:,.0f} MiB in use, which {cheapest} has for less; see the ranking"


def _gpu_utilization(plan: Plan, percent: float) -> str:
    """Judge a slower GPU: it is enough if this one's busy share of bandwidth and peak fits it."""
    now, precision = plan.inputs.gpu, plan.work.main.footprint.precision
    for other in sizes_with(plan, plan.gpu_memory_need):
        gpu = find_gpu(other.gpu, other.gpu_memory_mib)
        if gpu.relative_speed(now, precision) >= percent / 100:
            if other.size == plan.request.size:
                return f"no: no cheaper size has {percent:.0f} % of this GPU's speed and the memory"
            return (
                f"yes: {percent:.0f} % of an {now.name.removeprefix('NVIDIA ')} is less than all "
                f"of {other.size}'s {gpu.name.removeprefix('NVIDIA ')}; what is bound by launches "
                "takes as long there"
            )
    return "unknown: no size holds the model"


def _host_memory(plan: Plan, percent: float) -> str:
    instance = plan.inputs.instance
    need = instance.memory_gib * percent / 100
    share = plan.inputs.constants.usable_memory_share
    same = [i for i, _ in plan.request.prices.trainable() if i.has_same_gpu(instance)]
    enough = next((i for i in same if i.memory_gib * share >= need), None)
    if enough is None:
        return f"unknown: no size with this GPU has {need / share:.0f} GiB"
    verb = "yes" if enough.memory_gib > instance.memory_gib else "no"
    return (
        f"{verb}: {need:.1f} GiB in use; {share:.0%} of a host may be, and {enough.size} with "
        f"{enough.memory_gib:g} GiB is the cheapest with this GPU that is enough"
    )


def _data_wait(plan: Plan, percent: float) -> str:
    instance, price = plan.inputs.instance, plan.inputs.price.usd_per_hour
    larger = [
        (i, usd)
        for i, usd in plan.request.prices.trainable()
        if i.family == instance.family
        and i.num_gpus == instance.num_gpus
        and i.vcpus > instance.vcpus
    ]
    if not larger:
        return f"no: no size of {instance.family} has as many GPUs and more vCPUs"
    next_size, usd = larger[0]
    more = 100 * (usd / price - 1)
    # With the wait halved, as twice the vCPUs would, an hour's work takes this much less.
    saved = percent / 2
    dearer = 100 * ((1 - saved / 100) * (1 + more / 100) - 1)
    verb = "yes" if dearer <= 0 else "for time only"
    return (
        f"{verb}: {instance.vcpus} vCPUs feed the step; {next_size.size} has {next_size.vcpus}, "
        f"would save about {saved:.0f} % of the time and costs {more:.0f} % more an hour: "
        f"{dearer:+.0f} % a run"
    )


def _spot(plan: Plan, percent: float) -> str:
    found = spot_verdict(plan, saving=percent)
    return f"{found.suits}: {'; '.join(found.reasons)}"


# A plan's value of each signal (None: only the user or a finished run knows it), and the verdict.
SIGNALS: Mapping[str, tuple[Callable[[Plan], float] | None, Callable[[Plan, float], str]]] = {
    "dataset_samples": (lambda plan: float(trained_samples(plan.inputs.footprints)), _dataset),
    "dataset_gib": (lambda plan: plan.inputs.dataset_bytes / GIB, _preparing),
    "grant_usd": (None, _grant),
    "batch_size": (lambda plan: float(plan.work.main.footprint.global_batch), _batch),
    "hours_per_experiment": (lambda plan: plan.hours_on_demand, _hours),
    "model_mb": (lambda plan: plan.work.main.footprint.parameter_bytes / 1e6, _model),
    "gpu_memory_percent": (
        lambda plan: 100 * plan.gpu_memory_need / plan.inputs.instance.gpu_memory_mib,
        _gpu_memory,
    ),
    "host_memory_percent": (
        lambda plan: 100 * plan.host.need / plan.inputs.instance.memory_gib,
        _host_memory,
    ),
    "spot_saving_percent": (saving_percent, _spot),
    "parallel_jobs": (None, _jobs),
    "researchers": (None, _jobs),
    "gpu_utilization_percent": (lambda plan: plan.work.busy_percent[1], _gpu_utilization),
    "data_wait_percent": (None, _data_wait),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule that fires when its signal is at least (or at most) a threshold."""

    name: str
    signal: str
    consider: str
    says: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def fires(self, value: float) -> bool:
        """Return whether `value` is at or beyond the threshold."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most

    @property
    def condition(self) -> str:
        """The rule's condition in readable form."""
        if self.at_least is not None:
            return f"{self.signal} >= {self.at_least:g}"
        return f"{self.signal} <= {self.at_most:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A rule that fired, the evidence, and the models' verdict on its advice."""

    rule: Rule
    value: float
    origin: str
    verdict: str


def load_rules() -> list[Rule]:
    """Return the rules of rules.json."""
    rules = json.loads(_RULES_FILE.read_text(encoding="utf-8"))["rules"]
    return [Rule(**rule) for rule in rules]


def signals(plan: Plan) -> dict[str, float]:
    """Return the signals that the plan has."""
    return {name: of_plan(plan) for name, (of_plan, _) in SIGNALS.items() if of_plan}


def as_given(request: Request, given: Mapping[str, float]) -> Request:
    """Return the request changed by the given signals, so that all advice follows from them."""
    for name in given:
        if name not in SIGNALS:
            raise ValueError(f"signal {name!r} is unknown; {suggest(name, SIGNALS)}")
    changed = request
    if "dataset_samples" in given:
        changed = replace(changed, samples=_count(given, "dataset_samples"))
    if "dataset_gib" in given:
        changed = replace(changed, dataset_gib=given["dataset_gib"])
    if "batch_size" in given:
        size = _count(given, "batch_size")
        changed = replace(changed, batch=size, micro_batch=size)
    jobs = [_count(given, name) for name in ("parallel_jobs", "researchers") if name in given]
    return replace(changed, runs=max(jobs)) if jobs else changed


def _count(given: Mapping[str, float], name: str) -> int:
    if given[name] < 1 or given[name] != int(given[name]):
        raise ValueError(f"{name} is {given[name]:g}; use a whole number from 1")
    return int(given[name])


def fire(
    plan: Plan, rules: list[Rule], given: Mapping[str, float], origin: str = "given"
) -> list[Fired]:
    """Return the rules that fire; given signals replace the plan's."""
    values = {name: (value, "predicted") for name, value in signals(plan).items()}
    values |= {name: (value, origin) for name, value in given.items()}
    return [
        Fired(rule=rule, value=value, origin=where, verdict=SIGNALS[rule.signal][1](plan, value))
        for rule in rules
        if rule.signal in values
        for value, where in [values[rule.signal]]
        if rule.fires(value)
    ]

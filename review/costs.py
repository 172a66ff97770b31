"""The costs of each side: an hour of training, an idle month, and the run that sizing predicts.

Prices are sizing's, for the stack's region; those of alarms, keys, networks and the Guard are
us-east-1's. Costs that a template does not show (S3 storage, log volume, custom metrics while an
instance runs, transfer) are left out, as the comment states.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

from review.assembly import FleetSide, Side, StackSide
from review.spelling import as_list, number
from sizing import PRICE_REGION, catalogue, service_prices

LEFT_OUT = "S3, log volume, custom metrics while an instance runs, transfer, jobs on SageMaker"
NOT_PREDICTED = "not predicted on this side"
# The Guard reads a few objects and calls EC2 three times; modelled, not measured.
_GUARD_SECONDS = 2.0
_GUARD_MINUTES = 10
_MONTH = service_prices.HOURS_PER_MONTH
_USD_PER_MONTH = {
    "CloudWatch::CompositeAlarm": service_prices.COMPOSITE_ALARM_USD_PER_MONTH,
    "CloudWatch::Dashboard": service_prices.DASHBOARD_USD_PER_MONTH,
    "EC2::EIP": service_prices.PUBLIC_IPV4_USD_PER_HOUR * _MONTH,
    "EC2::NatGateway": service_prices.NAT_GATEWAY_USD_PER_HOUR * _MONTH,
    "KMS::Key": service_prices.KMS_KEY_USD_PER_MONTH,
}
# What costs nothing while it exists, what LEFT_OUT names, and what the hour has.
_FREE = re.compile(
    "(IAM|SSM|Events|SNS|SQS|Logs|S3|Batch|CDK|CloudFormation|ECR|AutoScaling|CloudWatch|Lambda)::|"
    "Custom::|KMS::Alias|EC2::(?!Instance|Host|TransitGateway|VPN|ClientVpn|Capacity|EC2Fleet|IPAM)"
)
_Find = Callable[..., catalogue.Price]
_MARKETS: Mapping[str, _Find] = {"Spot": catalogue.spot_price, "on demand": catalogue.hourly_price}


@dataclass(frozen=True, slots=True)
class CostRow:
    """One row of the cost table."""

    name: str
    before: str
    after: str
    difference: str = ""
    # Shown even if it does not differ.
    is_headline: bool = False


def cost_rows(base: Side, head: Side) -> list[CostRow]:
    """Return the cost of an hour, a run and an idle month on both sides, as table rows."""
    rows = []
    for name, old, new in _pairs(base, head):
        found = [*_hour_rows(_Hour.of(old), _Hour.of(new)), *_plan_rows(old, new)]
        # Of several, those that stay the same would hide those that change.
        rows += [replace(it, name=name + it.name, is_headline=not name and it.is_headline)
                 for it in found]  # fmt: skip
    idle_old, idle_new = (idle_usd_per_month(side) for side in (base, head))
    for name in sorted({*idle_old, *idle_new}):
        amounts = idle_old.get(name, 0.0), idle_new.get(name, 0.0)
        rows.append(_money_row(f"idle: {name}, $/month", *amounts))
    unpriced = _unpriced(base), _unpriced(head)
    for name in sorted({*unpriced[0], *unpriced[1]}):
        had, has = (each.get(name, []) for each in unpriced)
        if had != has:
            what = f"idle: {name}, for which there is **no price** here"
            rows.append(CostRow(what, str(len(had)), str(len(has)), "changed"))
    both = (sum(each.values()) for each in (idle_old, idle_new))
    return [*rows, _money_row("**a month with the fleet at zero**, $", *both)]


def _pairs(base: Side, head: Side) -> list[tuple[str, StackSide | None, StackSide | None]]:
    """Pair the stacks with a fleet, each with its name for the rows, if there are several."""
    old, new = (
        {name: each for name, each in side.stacks.items() if each.fleet} for side in (base, head)
    )
    if len(old) == len(new) == 1:  # also under another name
        new = dict(zip(old, new.values(), strict=True))
    names = sorted({*old, *new})
    return [(f"{it}: " * (len(names) > 1), old.get(it), new.get(it)) for it in names]


def price_note(base: Side, head: Side) -> str:
    """Say where and when the prices of instances are from, and how others are modelled."""
    notes = dict.fromkeys(
        f"{hour.region}: {hour.price_days()}"
        for _, *stacks in _pairs(base, head)
        for stack in stacks
        if (hour := _Hour.of(stack))
    )
    return (
        f"Prices of {'; '.join(notes) or PRICE_REGION} (sizing/catalogue). Volumes elsewhere are "
        f"modelled by the instance's price; a month with the fleet at zero, by {PRICE_REGION}'s"
    )


def plan_warnings(head: Side) -> list[str]:
    """Return sizing's warnings about head."""
    plans = [(name, (stack and stack.plan) or {}) for name, _, stack in _pairs(head, head)]
    return [f"{name}{warning}" for name, plan in plans for warning in plan.get("warnings") or []]


def idle_usd_per_month(side: Side) -> dict[str, float]:
    """Return the monthly cost of all stacks without an instance, by resource type."""
    dollars: dict[str, float] = {}
    for name, each in _resources(side):
        if usd := _resource_usd_per_month(name, each):
            dollars[name] = dollars.get(name, 0.0) + usd
    return dollars


def _unpriced(side: Side) -> dict[str, list[Any]]:
    """Return what may cost something in an idle month, but has no price here, by type."""
    found: dict[str, list[Any]] = {}
    for name, each in _resources(side):
        if not (_FREE.match(name) or _resource_usd_per_month(name, each)):
            found.setdefault(name, []).append(each)
    return found


def _resources(side: Side) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for stack in side.stacks.values():
        for each in stack.resources.values():
            yield each["Type"].removeprefix("AWS::"), each.get("Properties") or {}


def _resource_usd_per_month(name: str, properties: Mapping[str, Any]) -> float:
    match name:
        case "CloudWatch::Alarm":
            metrics = [it["MetricStat"] for it in as_list(properties.get("Metrics"))
                       if "MetricStat" in it] or [properties]  # fmt: skip
            if any(number(each.get("Period"), 60) < 60 for each in metrics):
                return len(metrics) * service_prices.HIGH_RESOLUTION_ALARM_USD_PER_MONTH
            return len(metrics) * service_prices.ALARM_USD_PER_MONTH
        case "EC2::VPCEndpoint" if properties.get("VpcEndpointType") == "Interface":
            zones = len(as_list(properties.get("SubnetIds"))) or 1
            return zones * _MONTH * service_prices.INTERFACE_ENDPOINT_USD_PER_HOUR
        case "EC2::Volume":
            return _MONTH * _volume_usd(properties, "Size")
        case "Lambda::Function":
            calls = _MONTH * 60 / _GUARD_MINUTES
            gb_seconds = calls * _GUARD_SECONDS * number(properties.get("MemorySize"), 128) / 1024
            usd = calls * service_prices.LAMBDA_USD_PER_REQUEST
            return usd + gb_seconds * service_prices.LAMBDA_ARM_USD_PER_GB_SECOND
    return _USD_PER_MONTH.get(name, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hour:
    """The parts of the cost of one hour with one instance."""

    region: str
    size: str
    fleet: FleetSide
    volumes: str
    volumes_usd: float
    initialization_usd: float
    address_usd: float

    @classmethod
    def of(cls, stack: StackSide | None) -> "_Hour | None":
        data = next(iter(stack.launch_templates), None) if stack else None
        if stack is None or not data:
            return None
        fleet, region = stack.fleet or FleetSide(), stack.region
        disks = [it["Ebs"] for it in as_list(data.get("BlockDeviceMappings")) if "Ebs" in it]
        # Our own subnets assign public addresses; existing ones, given by id, count as private.
        is_public = any(not isinstance(each, str) for each in fleet.subnets)
        size = str(data.get("InstanceType", "-"))
        return cls(
            region=region,
            size=size,
            fleet=fleet,
            volumes=" + ".join(map(_volume, disks)) or "-",
            volumes_usd=_factor(size, region) * sum(map(_volume_usd, disks)),
            initialization_usd=sum(
                service_prices.initialization_usd(number(disk.get("VolumeInitializationRate")))
                for disk in disks
            ),
            address_usd=service_prices.PUBLIC_IPV4_USD_PER_HOUR if is_public else 0.0,
        )

    def dearest(self, find: _Find) -> float | None:
        """Return the hourly price of the most expensive size that the fleet may launch."""
        known = [size for size in self.fleet.sizes if size in catalogue.instances()]
        prices = [find(size, self.region, assume=True) for size in known]
        return max((price.usd_per_hour for price in prices), default=None)

    def price(self, find: _Find) -> catalogue.Price | None:
        known = self.size in catalogue.instances()
        return find(self.size, self.region, assume=True) if known else None

    def price_days(self) -> str:
        prices = [price for find in _MARKETS.values() if (price := self.price(find))]
        return ", ".join(dict.fromkeys(f"{price.basis} of {price.day}" for price in prices))

    def instance(self, find: _Find) -> float | None:
        return price.usd_per_hour if (price := self.price(find)) else None

    def total(self, find: _Find) -> float | None:
        usd = self.instance(find)
        return None if usd is None else usd + self.volumes_usd + self.address_usd

    def bought(self) -> float | None:
        return self.total(_MARKETS["on demand" if self.fleet.on_demand_base else "Spot"])


def _hour_rows(old: _Hour | None, new: _Hour | None) -> list[CostRow]:
    def both(read: Callable[[_Hour], Any]) -> list[Any]:
        return [read(hour) if hour else None for hour in (old, new)]

    texts: dict[str, Callable[[_Hour], str]] = {
        "size": lambda it: it.size,
        "sizes the fleet may launch": lambda it: " ".join(it.fleet.sizes),
        "on-demand base": lambda it: str(it.fleet.on_demand_base),
        "volumes": lambda it: it.volumes,
    }
    amounts: dict[str, Callable[[_Hour], float | None]] = {}
    for name, find in _MARKETS.items():
        prices = both(methodcaller("price", find))
        bases = " → ".join(dict.fromkeys(price.basis for price in prices if price))
        amounts[f"instance, {name}, $/h ({bases})"] = methodcaller("instance", find)
        amounts[f"dearest size it may launch, {name}, $/h"] = methodcaller("dearest", find)
    loading = f"loading the root volume ({service_prices.IMAGE_GIB} GiB), $ per machine booted"
    amounts |= {
        "volumes, $/h": lambda it: it.volumes_usd,
        loading: lambda it: it.initialization_usd,
        "public IPv4, $/h": lambda it: it.address_usd,
    }
    for name, find in _MARKETS.items():
        amounts[f"**an hour of training, {name}**, $/h"] = methodcaller("total", find)
    if any(both(lambda it: it.fleet.on_demand_base)):
        amounts["an hour as the fleet buys it, $"] = _Hour.bought
    return [
        *(_text_row(name, *both(read)) for name, read in texts.items()),
        *(_money_row(name, *both(read)) for name, read in amounts.items()),
    ]


_HEADLINES = (
    *("run time and cost", "size", "hours, p50", "run on demand, $", "run on Spot, p50, $"),
    *("checkpoint fits the notice", "useful share of paid seconds"),
)
# Keys of <stack>.plan.json, which sizing writes at synthesis, in the order of the table.
_PLAN_KEYS: Sequence[tuple[str, str]] = (
    ("fits", "fits the GPU"),
    ("gpu_memory_mib", "GPU memory, MiB"),
    ("bound_by", "bound by"),
    ("epoch_seconds", "epoch, s"),
    ("hours_p50", "hours, p50"),
    ("hours_p90", "hours, p90"),
    ("usd_on_demand", "run on demand, $"),
    ("usd_spot_p50", "run on Spot, p50, $"),
    ("usd_spot_p90", "run on Spot, p90, $"),
    ("deadline_usd_mean", "run with its deadline, mean, $"),
    ("deadline_usd_p90", "run with its deadline, p90, $"),
    ("deadline_on_demand_share", "share of its hours on demand"),
    ("goodput_useful", "useful share of paid seconds"),
    ("usd_of_initializations", "loading the run's root volumes, $"),
    ("checkpoint_bytes", "checkpoint, bytes"),
    ("checkpoint_seconds", "checkpoint to S3, s"),
    ("notice_fits", "checkpoint fits the notice"),
)


def _plan_rows(*sides: StackSide | None) -> list[CostRow]:
    old, new = (each and each.plan for each in sides)
    if not (old or new):
        return [_text_row("run time and cost", NOT_PREDICTED, NOT_PREDICTED)]
    subjects = [_plan_subject(plan) if plan else NOT_PREDICTED for plan in (old, new)]
    # What is deployed has no plan: nothing says whether it differs.
    rows = [_text_row("predicted for", *subjects)] if old and new else []
    figures = [_with_deadline(plan or {}) for plan in (old, new)]
    for key, name in _PLAN_KEYS:
        before, after = (each.get(key) for each in figures)
        was = _predicted(before) if old else NOT_PREDICTED
        comes = _predicted(after) if new else NOT_PREDICTED
        difference = _percent(before, after) if old and new else ""
        rows.append(CostRow(name, was, comes, difference, name in _HEADLINES))
    return rows


def _with_deadline(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan with the figures of its deadline, if it has one, and of its goodput."""
    nested = {"deadline": plan.get("with_fallback"), "goodput": plan.get("goodput")}
    found = {f"{of}_{name}": v for of, each in nested.items() for name, v in (each or {}).items()}
    return {**plan, **found}


def _plan_subject(plan: Mapping[str, Any]) -> str:
    return " ".join(str(plan.get(key, "-")) for key in ("workload", "recipe", "size"))


def _predicted(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _volume(disk: Mapping[str, Any]) -> str:
    text = f"{disk.get('VolumeSize')} GiB {disk.get('VolumeType', 'gp2')}"
    if "Throughput" in disk or "Iops" in disk:
        text += f" ({disk.get('Iops', 3000)} IOPS, {disk.get('Throughput', 125)} MiB/s)"
    if rate := disk.get("VolumeInitializationRate"):
        text += f" (loaded at {rate} MiB/s)"
    return text


def _factor(size: str, region: str) -> float:
    """Return the ratio of volume prices to us-east-1's: the instance's, as for the Guard."""
    known = catalogue.instances().get(size)
    usual = known and known.on_demand_usd_per_hour
    return catalogue.hourly_price(size, region, assume=True).usd_per_hour / usual if usual else 1.0


def _volume_usd(disk: Mapping[str, Any], size: str = "VolumeSize") -> float:
    gib, iops, speed = (number(disk.get(name)) for name in (size, "Iops", "Throughput"))
    return service_prices.ebs_usd_per_hour(gib, iops, speed, str(disk.get("VolumeType", "gp2")))


def _text_row(name: str, before: str | None, after: str | None) -> CostRow:
    difference = "" if before == after else "changed"
    return CostRow(name, before or "-", after or "-", difference, name in _HEADLINES)


def _money_row(name: str, before: float | None, after: float | None) -> CostRow:
    was, comes = (f"{value:.4f}" if value is not None else "-" for value in (before, after))
    return CostRow(name, was, comes, _percent(before, after), name.startswith(("**", "dearest")))


def _percent(before: object, after: object) -> str:
    if isinstance(before, bool) or isinstance(after, bool) or before == after:
        return "" if before == after else "changed"
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return "changed"
    return f"{(after - before) / before:+.1%}" if before else f"{after - before:+.4g}"

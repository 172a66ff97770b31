"""CDK context as the stack parameters read it: cdk.json's defaults, known names, typed values."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from contract.program import PROGRAM_FILE
from contract.suggestion import suggest
from contract.trainer_options import OPTIONS
from stacks.parameters.fields import GROUPS, KINDS, OPEN_GROUPS

# In the repository a link to the app's own cdk.json; a wheel has the file.
CDK_JSON = (Path(__file__).parents[1] / "cdk.json").resolve()
QUALIFIER = "@aws-cdk/core:bootstrapQualifier"
# What `cdk acknowledge` and `cdk cli-telemetry` write into cdk.context.json.
_OF_CLI = ("acknowledged-issue-numbers", "cli-telemetry")
# cdk.json's values of parameters that decisions.py decides.
LEFT_OPEN = ("by-name", "by-size", "by-workload", "by-manifest", "by-plan", "by-wait")
# What is a program's, by the name that one may guess, and its name in program.json.
_OF_PROGRAMS = {
    "hyperparameter": "hyperparameters",
    "env": "environment",
    "metric": "metric_definitions",
    **{name: name for name in ("requirements", "working_folder", "interpreter")},
    **{name: name for name in ("channels", "notice_signal", "quiet_seconds")},
}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}


def of_cdk_json(path: Path | None = None) -> dict[str, object]:
    """Return the context in cdk.json, or in the user's, with CDK's own keys."""
    path = path or CDK_JSON
    return dict(json.loads(path.read_text("utf-8")).get("context", {})) if path.is_file() else {}


def defaults() -> dict[str, object]:
    """Return cdk.json's values by the names that `-c` takes."""
    return flatten(of_cdk_json())


def qualifier() -> str:
    """Return the qualifier of `cdk bootstrap` that synth takes without a `-c`; "" if none."""
    lookups, of_user = CDK_JSON.with_name("cdk.context.json"), Path.home() / ".cdk.json"
    found = json.loads(lookups.read_text("utf-8")) if lookups.is_file() else {}
    return str((of_cdk_json(of_user) | found | of_cdk_json()).get(QUALIFIER, ""))


def flatten(context: Mapping[str, object]) -> dict[str, object]:
    """Return a CDK context by the names that `-c` takes, without CDK's own keys.

    {"alarm": {"email": ...}} becomes alarm.email, which a separate alarm.email overrides.
    """
    # Feature flags start with @, lookups and CLI switches contain a colon, as a tag's key may.
    own = {
        name: value
        for name, value in context.items()
        if name.startswith("tags.") or not (name.startswith("@") or ":" in name or name in _OF_CLI)
    }
    flat: dict[str, object] = {}
    for name in own.keys() & {*OPEN_GROUPS, *GROUPS}:
        values = own.pop(name)
        if not isinstance(values, Mapping):
            raise ValueError(f"{name} is {values!r}; set each with -c {name}.NAME=VALUE")
        flat |= {f"{name}.{key}": value for key, value in values.items()}
    return flat | own


def refuse_unknown_names(given: Mapping[str, object]) -> None:
    """Refuse a name that is not a parameter, and suggest the nearest."""
    known = [*KINDS, *(f"train.{option}" for option in OPTIONS)]
    for name in given:
        if name in known or name.removeprefix("tags.") not in ("", name):
            continue
        if (first := name.partition(".")[0]) in _OF_PROGRAMS:
            raise ValueError(
                f"{name} is for programs: write it into its {Path(PROGRAM_FILE).name}, as part of "
                f'"{_OF_PROGRAMS[first]}" (docs/your-script.md)'
            )
        near = [each for each in known if each.endswith(f".{name}")]
        hint = f"did you mean {near[0]}?" if near else suggest(name, known)
        raise ValueError(f"context {name!r} is unknown; {hint}")


def parse(name: str, value: object) -> object:
    """Turn a context value into a parameter of the type that its field declares."""
    kind = str if name.partition(".")[0] in OPEN_GROUPS else KINDS[name].type
    return _PARSERS[kind](name, value)


def parse_int(name: str, value: object) -> int:
    """Read a whole number; values from `-c` are strings."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value.strip()):
        return int(value)
    raise ValueError(f"{name} is {value!r}; use a whole number")


def parse_text(name: str, value: object) -> str:
    """Read a string without surrounding white space."""
    # A number in cdk.json is text to the trainer, and in a tag.
    if name.partition(".")[0] in OPEN_GROUPS and not isinstance(value, str):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; use a string")
    return value.strip()


def _parse_float(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{name} is {value!r}; use a number")
    return number


def _parse_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUTHS:
        return _TRUTHS[value.strip().lower()]
    raise ValueError(f"{name} is {value!r}; use true or false")


def _parse_texts(name: str, value: object) -> tuple[str, ...]:
    # Overrides may contain commas (a=1,2), zones never do.
    separator = r"\s+" if name == "overrides" else r"[,\s]+"
    if isinstance(value, str):
        return tuple(re.split(separator, value.strip())) if value.strip() else ()
    if isinstance(value, list | tuple):
        return tuple(parse_text(name, item) for item in value)
    raise ValueError(f"{name} is {value!r}; use values separated by spaces")


_PARSERS: Mapping[object, Callable[[str, object], object]] = {
    str: parse_text,
    int: parse_int,
    float: _parse_float,
    bool: _parse_bool,
    tuple[str, ...]: _parse_texts,
}

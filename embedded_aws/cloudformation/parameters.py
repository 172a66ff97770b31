"""Decides the values of a template's parameters, SSM-typed ones included, and checks its Rules.

Refuses unknown, missing and impossible values in CloudFormation's words.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedded_aws.cloudformation.errors import CloudFormationError
from embedded_aws.cloudformation.intrinsics import Expressions, scalar, truth
from embedded_aws.cloudformation.template import Template

SSM_VALUE = re.compile(r"AWS::SSM::Parameter::Value<(.+)>")
# Reads SSM parameters by name; names that do not exist are missing from the result.
ReadSsm = Callable[[Sequence[str]], Mapping[str, str]]
# Whether a value of an AWS-specific type (such as AWS::EC2::Image::Id) exists.
Exists = Callable[[str, str], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter: the text passed for it and its value in expressions."""

    given: str
    value: str | list[str]
    resolved: str | None = None
    no_echo: bool = False

    def described(self, name: str) -> dict[str, str]:
        shown = {"ParameterKey": name, "ParameterValue": "****" if self.no_echo else self.given}
        if self.resolved is not None:
            shown["ResolvedValue"] = self.resolved
        return shown


def decide_parameters(
    template: Template,
    given: Sequence[Mapping[str, Any]],
    *,
    previous: Mapping[str, Parameter],
    read_ssm: ReadSsm,
    exists: Exists,
) -> dict[str, Parameter]:
    """Return the value of every parameter of the template, or refuse."""
    declared = template.section("Parameters")
    texts = _texts(declared, given, previous)
    ssm_names = [
        text for name, text in texts.items() if SSM_VALUE.fullmatch(declared[name]["Type"])
    ]
    found = read_ssm(ssm_names) if ssm_names else {}
    absent = sorted(set(ssm_names) - set(found))
    if absent:
        raise CloudFormationError(
            f"Unable to fetch parameters [{','.join(absent)}] from parameter store for this "
            "account."
        )
    decided = {}
    for name, text in texts.items():
        declaration = declared[name]
        _check_constraints(name, text, declaration)
        ssm = SSM_VALUE.fullmatch(declaration["Type"])
        kind = ssm.group(1) if ssm else declaration["Type"]
        resolved = found[text] if ssm else None
        effective = text if resolved is None else resolved
        _check_kind(name, effective, kind, exists)
        decided[name] = Parameter(
            given=text,
            value=_typed(effective, kind),
            resolved=resolved,
            no_echo=truth(declaration.get("NoEcho", False)),
        )
    return decided


def check_rules(template: Template, parameters: Mapping[str, Any]) -> None:
    """Refuse if an assertion of the Rules section fails."""
    expressions = Expressions(parameters=parameters, mappings=template.section("Mappings"))
    for name, rule in template.section("Rules").items():
        if "RuleCondition" in rule and not truth(expressions.value(rule["RuleCondition"])):
            continue
        for assertion in rule.get("Assertions", []):
            if not truth(expressions.value(assertion["Assert"])):
                why = assertion.get("AssertDescription", "an assertion failed")
                raise CloudFormationError(f"Template validation error: Rule {name} failed: {why}")


def _texts(
    declared: Mapping[str, Any],
    given: Sequence[Mapping[str, Any]],
    previous: Mapping[str, Parameter],
) -> dict[str, str]:
    by_name = {item["ParameterKey"]: item for item in given}
    unknown = [name for name in by_name if name not in declared]
    if unknown:
        raise CloudFormationError(
            f"Parameters: [{', '.join(unknown)}] do not exist in the template"
        )
    texts: dict[str, str] = {}
    missing = []
    for name, declaration in declared.items():
        item = by_name.get(name, {})
        if item.get("UsePreviousValue"):
            if name not in previous:
                raise CloudFormationError(
                    f"Invalid input for parameter key {name}. Cannot specify usePreviousValue as "
                    "true for a parameter key not in the previous template"
                )
            texts[name] = previous[name].given
        elif "ParameterValue" in item:
            texts[name] = item["ParameterValue"]
        elif "Default" in declaration:
            texts[name] = scalar(declaration["Default"])
        else:
            missing.append(name)
    if missing:
        raise CloudFormationError(f"Parameters: [{', '.join(missing)}] must have values")
    return texts


def _check_constraints(name: str, text: str, declaration: Mapping[str, Any]) -> None:
    described = declaration.get("ConstraintDescription")

    def refuse(why: str) -> CloudFormationError:
        return CloudFormationError(
            f"Parameter '{name}' failed to satisfy constraint: {described}"
            if described
            else f"Parameter '{name}' {why}"
        )

    if "AllowedValues" in declaration and text not in map(str, declaration["AllowedValues"]):
        raise refuse("must be one of AllowedValues")
    pattern = declaration.get("AllowedPattern")
    if pattern and not re.fullmatch(pattern, text):
        raise refuse(f"must match pattern {pattern}")
    if len(text) < int(declaration.get("MinLength", 0)):
        raise refuse(f"must contain at least {declaration['MinLength']} characters")
    if "MaxLength" in declaration and len(text) > int(declaration["MaxLength"]):
        raise refuse(f"must contain at most {declaration['MaxLength']} characters")
    if declaration["Type"] != "Number":
        return
    number = _number(name, text)
    if "MinValue" in declaration and number < float(declaration["MinValue"]):
        raise refuse(f"must be a number not less than {declaration['MinValue']}")
    if "MaxValue" in declaration and number > float(declaration["MaxValue"]):
        raise refuse(f"must be a number not greater than {declaration['MaxValue']}")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise CloudFormationError(f"Parameter '{name}' must be a number") from error


def _check_kind(name: str, text: str, kind: str, exists: Exists) -> None:
    listed = re.fullmatch(r"List<(.+)>", kind)
    element = listed.group(1) if listed else kind
    for item in text.split(",") if listed else [text]:
        if element == "Number":
            _number(name, item)
        elif element.startswith("AWS::") and not exists(element, item.strip()):
            raise CloudFormationError(
                f"Parameter validation failed: parameter value {item.strip()} for parameter name "
                f"{name} does not exist"
            )


def _typed(text: str, kind: str) -> str | list[str]:
    if kind == "CommaDelimitedList" or kind.startswith("List<"):
        return [item.strip() for item in text.split(",")]
    return text

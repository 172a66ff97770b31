"""The variables of run.env in a template's user data."""

import re
from collections.abc import Mapping
from typing import Any, cast

from contract.run_env import Name
from review.spelling import spell

_HERE_DOCUMENT = re.compile(r"run\.env\" <<'(\w+)'\n(.*?)\n\1\n(.*)", re.DOTALL)


def read_run_env(template: Mapping[str, Any]) -> dict[Name, str]:
    """Return run.env's variables from the launch template, none if there is no run.env."""
    return _parts(template)[0]


def boot_script(template: Mapping[str, Any]) -> str:
    """Return what the user data runs after writing run.env."""
    return _parts(template)[1]


def _parts(template: Mapping[str, Any]) -> tuple[dict[Name, str], str]:
    for resource in (template.get("Resources") or {}).values():
        if resource["Type"] == "AWS::EC2::LaunchTemplate":
            data = resource["Properties"].get("LaunchTemplateData", {})
            found = _HERE_DOCUMENT.search(spell(data.get("UserData", "")))
            if found:
                lines = [line.partition("=") for line in found.group(2).splitlines()]
                variables = {cast(Name, name): value.strip('"') for name, _, value in lines}
                return variables, found.group(3)
    return {}, ""

"""Read the run.env that user data writes: the contract between infrastructure and machine."""

import re
import shlex


def parse_run_env(user_data: str) -> dict[str, str]:
    """Find the run.env in the user data's here-document and return its variables."""
    match = re.search(r"<<'?(\w+)'?\n(.*?)\n\1\n", user_data, re.DOTALL)
    if match is None:
        raise ValueError("the user data holds no here-document with run.env")
    variables = {}
    for line in match[2].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            variables[name] = " ".join(shlex.split(value))
    return variables

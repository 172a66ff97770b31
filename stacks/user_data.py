"""The user data: a bash script that writes two files and continues with userdata/first_boot.sh."""

from collections.abc import Mapping
from pathlib import Path

from contract.run_env import Name
from contract.trainer_options import write_words
from sizing import catalogue
from stacks.parameters import StackParameters

USERDATA = Path(__file__).parent.parent / "userdata"
FIRST_BOOT_FILE, END_MACHINE_FILE = USERDATA / "first_boot.sh", USERDATA / "end_machine.py"
# EC2 refuses user data of more than 16 KB before base64 encoding.
MAX_BYTES = 16_384
# At synth, tokens are shorter than the values that CloudFormation puts in their place: two bucket
# names of 63 characters, an asset's URL, a region.
TOKEN_ALLOWANCE_BYTES = 512
DATA_MOUNT = "/data"
# The name in the block device mapping, which the volume repeats in its NVMe identify data.
DATA_DEVICE_NAME = "/dev/sdf"
# Next to the fleet's: userdata/first_boot.sh reads it and adds BUNDLE_URI.
BUNDLE_PARAMETER = "bundle-uri"
_END = "END_OF_FILE"


def run_env(
    parameters: StackParameters,
    *,
    prediction: str,
    dataset_uri: str,
    run_uri: str,
    stack_name: str,
    region: str,
    fleet_parameter: str,
) -> dict[Name, str]:
    """Return run.env's variables except BUNDLE_URI; the values may be CDK tokens."""
    return {
        "RUN_ID": parameters.run_id,
        "WORKLOAD": parameters.workload,
        "RECIPE": parameters.recipe,
        "OVERRIDES": f'"{" ".join(parameters.overrides)}"',
        "PREDICTION": f'"{prediction}"',
        "DATASET_URI": dataset_uri,
        "RUN_URI": run_uri,
        "DATA_MOUNT": DATA_MOUNT,
        "DATA_ON": parameters.data_on,
        "DATA_DEVICE_NAME": DATA_DEVICE_NAME,
        # Every size of the fleet has at least this many.
        "NUM_GPUS": str(min(catalogue.find(size).num_gpus for size in parameters.sizes)),
        "TRAINER_OPTIONS": f'"{write_words(parameters.train)}"',
        "NOTICE_BUDGET_SECONDS": str(parameters.notice_budget_seconds),
        "DATASET_WAIT_SECONDS": str(parameters.dataset_wait_seconds),
        "STACK_NAME": stack_name,
        "AWS_REGION": region,
        "FLEET_PARAMETER": fleet_parameter,
    }


def render(environment: Mapping[Name, str]) -> str:
    """Return the script: run.env, what ends a machine that cannot boot, then first_boot.sh.

    The files go below $MACHINE_ROOT (empty on EC2); both programs are verbatim.
    """
    lines = "".join(f"{name}={value}\n" for name, value in environment.items())
    script = (
        '#!/bin/bash\nmkdir -p "${MACHINE_ROOT:-}/etc/training"\n'
        + _file("run.env", lines)
        + _file(END_MACHINE_FILE.name, END_MACHINE_FILE.read_text(encoding="utf-8"))
        + FIRST_BOOT_FILE.read_text(encoding="utf-8")
    )
    size = len(script.encode()) + TOKEN_ALLOWANCE_BYTES
    if size > MAX_BYTES:
        raise ValueError(
            f"the user data may have {size} bytes; EC2 takes {MAX_BYTES}: shorten the overrides"
        )
    return script


def _file(name: str, text: str) -> str:
    return f"cat > \"${{MACHINE_ROOT:-}}/etc/training/{name}\" <<'{_END}'\n{text}{_END}\n"

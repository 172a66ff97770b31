"""The user data: a bash script that writes run.env and continues with userdata/first_boot.sh."""

from collections.abc import Mapping
from pathlib import Path

from contract.run_env import Name
from contract.trainer_options import write_words
from sizing import catalogue
from stacks.parameters import StackParameters

FIRST_BOOT_FILE = Path(__file__).parent.parent / "userdata" / "first_boot.sh"
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
_END = "END_OF_RUN_ENV"


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


def render(environment: Mapping[Name, str], first_boot: str) -> str:
    """Return the script: run.env under $MACHINE_ROOT (empty on EC2), then `first_boot` verbatim."""
    script = _script(environment, first_boot)
    size = len(script.encode()) + TOKEN_ALLOWANCE_BYTES
    if size > MAX_BYTES:
        raise ValueError(
            f"the user data may have {size} bytes; EC2 takes {MAX_BYTES}: shorten the overrides "
            "or userdata/first_boot.sh"
        )
    return script


def _script(environment: Mapping[Name, str], first_boot: str) -> str:
    lines = "\n".join(f"{name}={value}" for name, value in environment.items())
    return (
        "#!/bin/bash\n"
        'mkdir -p "${MACHINE_ROOT:-}/etc/training"\n'
        f"cat > \"${{MACHINE_ROOT:-}}/etc/training/run.env\" <<'{_END}'\n"
        f"{lines}\n{_END}\n{first_boot}"
    )

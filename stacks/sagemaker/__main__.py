"""`python -m stacks.sagemaker submit | sweep`: runs as SageMaker training jobs.

`submit` creates the job of one run; `sweep` hands those of a sweep.json to a queue of AWS Batch.
With --dry-run they print the requests and change nothing. Exit code 2: a request would be refused,
and why.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from contract.description import describe
from contract.grammar import argument_type, parse_positive, parse_positive_count
from contract.trainer_options import SAGEMAKER_OPTIONS, recipe_field
from stacks.parameters.workloads import recipes, workloads
from stacks.sagemaker.prices import price_note
from stacks.sagemaker.request import JobSettings, job_name, training_job
from stacks.sagemaker.service_jobs import read_sweep, service_job

_positive, _count = argument_type(parse_positive), argument_type(parse_positive_count)
# The channels whose files the container imports before it trains.
SPLITS = ("train", "validation", "test")


def main(arguments: Sequence[str], client: Callable[[str], Any] = boto3.client) -> int:
    """Print the requests, or send them; `client` makes the client of a service."""
    options = _parse(arguments)
    try:
        code: int = options.act(options, client)
        return code
    except ValueError as mistake:
        print(f"sagemaker: {mistake}", file=sys.stderr)
        return 2


def _submit(options: argparse.Namespace, client: Callable[[str], Any]) -> int:
    request = training_job(_settings(options))
    note = price_note(options.instance_type, options.max_hours, options.instances)
    print(note, file=sys.stderr)
    if options.dry_run:
        print(json.dumps(request, indent=2))
        return 0
    try:
        job = client("sagemaker").create_training_job(**request)
    except (BotoCoreError, ClientError) as error:
        print(f"sagemaker: the job was not created: {error}", file=sys.stderr)
        return 1
    name = request["TrainingJobName"]
    print(f"[ok] {job['TrainingJobArn']} trains {options.run_uri}")
    print(f"to stop it, saved: aws sagemaker stop-training-job --training-job-name {name}")
    return 0


def _sweep(options: argparse.Namespace, client: Callable[[str], Any]) -> int:
    """Queue a job for each run of the sweep that has not finished."""
    try:
        sweep, unfinished = read_sweep(options.runs_uri, options.sweep_file, client)
    except (BotoCoreError, ClientError) as error:
        print(f"sagemaker: the sweep of {options.runs_uri} was not read: {error}", file=sys.stderr)
        return 1
    options.workload, options.recipe = sweep.workload, sweep.recipe
    given, now = options.hyperparameter, _now()
    jobs = []
    for number, run in enumerate(unfinished):
        options.run_uri = f"{options.runs_uri.rstrip('/')}/{run.name}"
        options.hyperparameter = [*given, *run.overrides]
        # Long names are cut, and must differ.
        options.job_name = job_name(options.run_uri, f"{number}-{now}")
        jobs.append(service_job(training_job(_settings(options)), options))
    note = price_note(options.instance_type, options.max_hours, options.instances)
    print(f"{len(jobs)} runs; each: {note}", file=sys.stderr)
    if options.dry_run:
        print(json.dumps(jobs, indent=2))
        return 0
    batch = client("batch")
    for job in jobs:
        try:
            queued = batch.submit_service_job(**job)
        except (BotoCoreError, ClientError) as error:
            print(f"sagemaker: {job['jobName']} was not queued: {error}", file=sys.stderr)
            return 1
        print(f"[ok] {queued['jobArn']}")
    rest = len(sweep.runs) - len(jobs)
    print(f"[ok] {len(jobs)} of {len(sweep.runs)} runs are queued, {rest} had finished")
    return 0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def _settings(options: argparse.Namespace) -> JobSettings:
    known = workloads()
    if options.workload in known and options.recipe not in recipes(options.workload):
        raise ValueError(
            f"the workload {options.workload!r} has no recipe {options.recipe!r}; known are "
            f"{', '.join(recipes(options.workload))}"
        )
    if options.workload not in known and ":" not in options.workload:
        raise ValueError(
            f"unknown workload {options.workload!r}; known are {', '.join(known)}, and your "
            "own as package.module:NAME"
        )
    if (options.max_wait_hours is not None) and not options.spot:
        raise ValueError("--max-wait-hours is for managed Spot only; add --spot")
    wait = (options.max_wait_hours or 2 * options.max_hours) if options.spot else None
    pairs = _pairs("--hyperparameter", options.hyperparameter)
    own = {"workload": options.workload, "recipe": options.recipe}
    for name in (*own, "run-uri", "dataset-uri"):
        if name in pairs:
            raise ValueError(f"--hyperparameter {name}=... is an option of its own: give --{name}")
    hyperparameters = {n: v for n, v in pairs.items() if n in SAGEMAKER_OPTIONS}
    recipe = {recipe_field(n): v for n, v in pairs.items() if n not in SAGEMAKER_OPTIONS}
    if recipe and options.workload in known:  # one's own is in the image
        describe(options.workload, options.recipe, [f"{n}={v}" for n, v in recipe.items()])
    parsed = {
        "job_name": options.job_name or job_name(options.run_uri, _now()),
        "hyperparameters": {**own, **hyperparameters, **recipe},
        "max_wait_hours": wait,
        "metric": _pairs("--metric", options.metric),
        "channel": _channels(options),
    }
    names = {field.name for field in fields(JobSettings)}
    plain = {name: value for name, value in vars(options).items() if name in names}
    return JobSettings(**{**plain, **parsed})


def _channels(options: argparse.Namespace) -> dict[str, str]:
    """Channels with files of one's own, as the entry point understands them."""
    channels = _pairs("--channel", options.channel)
    if bool(options.dataset_uri) == bool(channels):
        raise ValueError("give either --dataset-uri, or --channel train=... and validation=...")
    if channels and not {"train", "validation"} <= channels.keys() <= {*SPLITS}:
        raise ValueError(
            f"the channels are {', '.join(channels)}; give train and validation, test if wanted"
        )
    return channels


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ValueError(f"{option} is {text!r}; write NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stacks.sagemaker", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    submit = commands.add_parser("submit", help="create a training job")
    submit.set_defaults(act=_submit)
    add = submit.add_argument
    add("--workload", required=True, help="a known name, or your own as package.module:NAME")
    add("--recipe", required=True)
    add("--run-uri", required=True, help="s3://bucket/runs/<run id>, new or to be resumed")
    add("--job-name", help="default: the run's id and the time")
    _add_job(submit)
    sweep = commands.add_parser("sweep", help="queue the runs of a sweep that have not finished")
    sweep.set_defaults(act=_sweep)
    add = sweep.add_argument
    add("--runs-uri", required=True, help="s3://bucket/prefix with sweep.json and the runs")
    add("--sweep-file", type=Path, help="a copy of sweep.json; then no run counts as finished")
    add("--queue", required=True, help="of AWS Batch, of the type SAGEMAKER_TRAINING")
    add("--attempts", type=_count, default=3, help="of each job, 1 to 10: %(default)s")
    add("--priority", type=int, help="within the queue, or within the share")
    add("--share", default="", help="of a queue with fair share")
    _add_job(sweep)
    return parser.parse_args(arguments)


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add what every job is asked for."""
    add = parser.add_argument
    add("--dataset-uri", default="", help="s3://bucket/prefix with a manifest; or give channels:")
    add("--image", required=True, help="of stacks/sagemaker/Dockerfile, in ECR")
    add("--role", required=True, help="ARN of the role that the container gets")
    add("--instance-type", required=True, metavar="ml.g5.2xlarge")
    add("--instances", type=_count, default=1, help="that train together, as one run: %(default)s")
    add("--max-hours", type=_positive, default=24.0, help="that it may run: %(default)s")
    add("--spot", action="store_true", help="managed Spot training")
    add("--max-wait-hours", type=_positive, help="with waiting for Spot: twice --max-hours")
    add("--volume-gib", type=int, default=200, help="where it has no own disks: %(default)s")
    more: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME=VALUE"}
    add("--hyperparameter", help="a field of the recipe, or an option of training run", **more)
    add("--channel", help="train, validation or test: s3://... of files for `data import`", **more)
    add("--metric", help="name and regular expression, besides the loss and the like", **more)
    add("--subnet", action="append", default=[], help="of a VPC that reaches S3")
    add("--security-group", action="append", default=[])
    add("--kms-key", default="", help="for the job's own output")
    add("--dry-run", action="store_true", help="print what would be sent, and send nothing")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

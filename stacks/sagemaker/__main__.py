"""`python -m stacks.sagemaker submit | sweep`: runs as SageMaker training jobs.

`submit` creates the job of one run; `sweep` hands those of a sweep.json to a queue of AWS Batch.
With --dry-run they print the requests and change nothing. The exit code is 2 if a request would be
refused; the message says why.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from contract.description import describe
from contract.grammar import argument_type, parse_positive, parse_positive_count
from contract.keys import SPLITS, SWEEP_JOBS
from contract.trainer_options import OPTIONS, SAGEMAKER_OPTIONS, check_option, recipe_field
from stacks.parameters.workloads import recipes, workloads
from stacks.sagemaker.prices import ON_DEMAND_USD_PER_HOUR, price_note
from stacks.sagemaker.request import JobSettings, job_name, training_job
from stacks.sagemaker.service_jobs import (
    JobState,
    QueuedSweep,
    SweepObjects,
    most_usd,
    patient_client,
    read_sweep,
    service_job,
)

_positive, _count = argument_type(parse_positive), argument_type(parse_positive_count)


def sagemaker_command(
    arguments: Sequence[str], client: Callable[[str], Any] = patient_client
) -> int:
    """Print the requests or send them; `client` makes the client of a service."""
    options = _parse(arguments)
    try:
        code: int = options.act(options, client)
        return code
    except ValueError as mistake:
        print(f"sagemaker: {mistake}", file=sys.stderr)
        return 2


def _submit(options: argparse.Namespace, client: Callable[[str], Any]) -> int:
    request = training_job(_settings(options))
    _refuse_fields(options)
    note = price_note(options.instance_type, options.max_hours, options.instances)
    print(note, file=sys.stderr)
    if options.dry_run:
        print(json.dumps(request, indent=2))
        return 0
    name = request["TrainingJobName"]
    try:
        job = client("sagemaker").create_training_job(**request)
    except (BotoCoreError, ClientError) as error:
        code = error.response["Error"]["Code"] if isinstance(error, ClientError) else ""
        how = "the job was not created"
        # An answer may be lost, and the request, sent again, be refused for its own first job.
        if code == "ResourceInUse" or isinstance(error, HTTPClientError):
            see = f"aws sagemaker describe-training-job --training-job-name {name}"
            how = f"there may be a job {name}: before you submit again, see `{see}`"
        print(f"sagemaker: {how}: {error}", file=sys.stderr)
        return 1
    print(f"[ok] {job['TrainingJobArn']} trains {options.run_uri}")
    print(f"to save and stop it: aws sagemaker stop-training-job --training-job-name {name}")
    return 0


def _sweep(options: argparse.Namespace, client: Callable[[str], Any]) -> int:
    """Queue a job for each run of the sweep that has not finished and has no current job."""
    try:
        sweep, unfinished = read_sweep(options.runs_uri, options.sweep_file, client)
        objects = None if options.sweep_file else SweepObjects(options.runs_uri, client)
        kept, states = _queued(options, objects, client)
    except (BotoCoreError, ClientError) as error:
        print(f"sagemaker: the sweep of {options.runs_uri} was not read: {error}", file=sys.stderr)
        return 1
    options.workload, options.recipe = sweep.workload, sweep.recipe
    given, now = options.hyperparameter, _now()
    jobs = {}
    for number, run in enumerate(unfinished):
        if any(not each.is_over for each in states.get(run.name, [])):
            continue
        options.run_uri = f"{options.runs_uri.rstrip('/')}/{run.name}"
        options.hyperparameter = [*given, *run.overrides]
        # Long names are truncated, but must still differ.
        options.job_name = job_name(options.run_uri, f"{number}-{now}")
        jobs[run.name] = service_job(training_job(_settings(options)), options)
    _refuse_fields(options)
    note = price_note(options.instance_type, options.max_hours, options.instances)
    print(f"{len(jobs)} runs; each: {note}", file=sys.stderr)
    affordable = list(jobs)
    if kept.max_usd is not None and kept.usd_of_job is not None:
        left = kept.max_usd - kept.reserved(states)
        affordable = affordable[: max(0, math.floor(left / kept.usd_of_job + 1e-9))]
    if options.dry_run:
        print(json.dumps([jobs[name] for name in affordable], indent=2))
    elif not _submit_all({name: jobs[name] for name in affordable}, kept, objects, client):
        return 1
    if rest := len(jobs) - len(affordable):
        print(
            f"{rest} runs are not queued: a run is queued only while the sweep's cost so far and "
            f"the most that its queued runs may still cost, ${kept.usd_of_job:.2f} each, stay "
            f"within --max-usd {kept.max_usd:g}; once some have ended, queue the rest with "
            f"`runs resume {options.runs_uri}`",
            file=sys.stderr,
        )
    if not options.dry_run:
        others = len(unfinished) - len(jobs)
        print(
            f"[ok] {len(affordable)} of {len(sweep.runs)} runs are queued, {others} were already, "
            f"{len(sweep.runs) - len(unfinished)} had ended"
        )
    return 0


def _queued(
    options: argparse.Namespace, objects: SweepObjects | None, client: Callable[[str], Any]
) -> tuple[QueuedSweep, dict[str, list[JobState]]]:
    """Return what was queued before, updated by the options, and the jobs' current states."""
    older = None
    if objects is not None and (found := objects.read(SWEEP_JOBS)):
        older = QueuedSweep.from_bytes(found, f"{options.runs_uri}/{SWEEP_JOBS}")
    usd = options.usd_per_hour
    if usd is None and ".us-east-1." in options.image:  # whose prices these are
        usd = ON_DEMAND_USD_PER_HOUR.get(options.instance_type)
    elif usd is None and older and older.arguments == options.arguments and older.usd_per_hour:
        usd = older.usd_per_hour / options.instances  # `runs resume` can be given no other
    if options.max_usd is not None and usd is None:
        raise ValueError(
            f"--max-usd is {options.max_usd:g}, but the price of {options.instance_type} is not "
            "known here; add --usd-per-hour, for one instance on demand"
        )
    hourly = None if usd is None else usd * options.instances
    of_job = None if hourly is None else most_usd(hourly, options.max_hours, options.attempts)
    if options.max_usd is not None and of_job is not None and of_job > options.max_usd + 1e-9:
        raise ValueError(
            f"--max-usd is {options.max_usd:g}, but one run may cost ${of_job:.2f} "
            f"({options.attempts} attempts of {options.max_hours:g} h); use fewer --attempts, "
            "a lower --max-hours, or more dollars"
        )
    if older is not None:
        # Earlier jobs may have been allowed more time or attempts, or have cost more an hour.
        of_job = None if of_job is None else max(of_job, older.usd_of_job or 0.0)
        hourly = None if hourly is None else max(hourly, older.usd_per_hour or 0.0)
    kept = QueuedSweep(
        arguments=options.arguments,
        usd_per_hour=hourly,
        max_usd=options.max_usd,
        usd_of_job=of_job,
        jobs=dict(older.jobs) if older else {},
    )
    return kept, kept.look(client) if kept.jobs else {}


def _submit_all(
    jobs: Mapping[str, Mapping[str, Any]],
    kept: QueuedSweep,
    objects: SweepObjects | None,
    client: Callable[[str], Any],
) -> bool:
    """Queue the jobs in order, each recorded in jobs.json at once; return whether all were.

    If somebody else queues the sweep at the same time, one of the two ends its job and gives up.
    """
    batch = client("batch")
    for number, (name, job) in enumerate(jobs.items()):
        queued = None
        try:
            queued = batch.submit_service_job(**job)
            kept.jobs.setdefault(name, []).append(queued["jobId"])
            if objects is not None:
                objects.write(SWEEP_JOBS, kept.to_bytes())
        except (BotoCoreError, ClientError) as error:
            how, again = "not queued", "; the same command queues the rest" if objects else ""
            if queued is not None:
                how = _end_unknown(batch, queued["jobId"])
            elif isinstance(error, HTTPClientError) or "clientToken" in str(error):
                look = f"aws batch list-service-jobs --job-queue {job['jobQueue']}"
                how, again = "perhaps queued", f"; see {look}, and end it before the rest is queued"
            print(
                f"sagemaker: {job['jobName']} was {how}: {error} ({number} of {len(jobs)} "
                f"are queued{again})",
                file=sys.stderr,
            )
            return False
        print(f"[ok] {queued['jobArn']}")
    return True


def _end_unknown(batch: Any, job: str) -> str:
    """End a job that jobs.json did not take; return what became of it."""
    try:
        batch.terminate_service_job(jobId=job, reason="not in jobs.json")
    except (BotoCoreError, ClientError):
        end = f"aws batch terminate-service-job --reason unknown --job-id {job}"
        return f"queued, but jobs.json did not take it: end it with `{end}`"
    return "ended, as jobs.json did not take it (does somebody else queue the sweep?)"


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
            raise ValueError(f"--hyperparameter {name}=... is an option of its own: use --{name}")
    hyperparameters = {n: v for n, v in pairs.items() if n in SAGEMAKER_OPTIONS}
    for name, value in hyperparameters.items():
        if (option := name.replace("-", "_")) in OPTIONS:
            check_option(option, value)
    others = [name for name in pairs if name not in SAGEMAKER_OPTIONS]
    recipe = {recipe_field(name, options.workload): pairs[name] for name in others}
    if recipe and options.workload in known:  # the user's own is in the image
        options.fields.append([f"{n}={v}" for n, v in recipe.items()])
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


def _refuse_fields(options: argparse.Namespace) -> None:
    """Have the trainer refuse the jobs' recipes, in one process for all: it imports torch."""
    if options.fields:
        describe(options.workload, options.recipe, options.fields[0], also=options.fields[1:])


def _channels(options: argparse.Namespace) -> dict[str, str]:
    """Return the channels with the user's own files, as the entry point understands them."""
    channels = _pairs("--channel", options.channel)
    if bool(options.dataset_uri) == bool(channels):
        raise ValueError("use either --dataset-uri, or --channel train=... and validation=...")
    if channels and not {"train", "validation"} <= channels.keys() <= {*SPLITS}:
        raise ValueError(
            f"the channels are {', '.join(channels)}; use train and validation, and test if wanted"
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
    add("--queue", required=True, help="an AWS Batch queue of type SAGEMAKER_TRAINING")
    add("--attempts", type=_count, default=3, help="attempts per job, 1 to 10: %(default)s")
    add("--priority", type=int, help="priority within the queue or the share")
    add("--share", default="", help="share of a fair-share queue")
    add("--max-usd", type=_positive, help="limit of the entire sweep; default: none")
    add("--usd-per-hour", type=_positive, help="price of an instance; known here for us-east-1")
    _add_job(sweep)
    options = parser.parse_args(arguments)
    # What `runs resume` passes again.
    options.arguments = [word for word in arguments if word != "--dry-run"]
    options.fields = []  # of each job's recipe
    return options


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add the options of every job."""
    add = parser.add_argument
    add("--dataset-uri", default="", help="s3://bucket/prefix with a manifest; or use --channel")
    add("--image", required=True, help="image of stacks/sagemaker/Dockerfile, in ECR")
    add("--role", required=True, help="ARN of the role that the container gets")
    add("--instance-type", required=True, metavar="ml.g5.2xlarge")
    add("--instances", type=_count, default=1, help="instances that train the run: %(default)s")
    add("--max-hours", type=_positive, default=24.0, help="time limit of a job: %(default)s")
    add("--spot", action="store_true", help="managed Spot training")
    add("--max-wait-hours", type=_positive, help="with waiting for Spot; default: 2 x --max-hours")
    add("--volume-gib", type=_count, default=200, help="for a size without disks: %(default)s")
    more: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME=VALUE"}
    add("--hyperparameter", help="a field of the recipe, or an option of training run", **more)
    add("--channel", help="train, validation or test: s3://... of files for `data import`", **more)
    add("--metric", help="name and regular expression, besides the loss and the like", **more)
    add("--subnet", action="append", default=[], help="a subnet of a VPC that reaches S3")
    add("--security-group", action="append", default=[])
    add("--kms-key", default="", help="for the job's own output")
    add("--dry-run", action="store_true", help="print what would be sent, and send nothing")


if __name__ == "__main__":
    sys.exit(sagemaker_command(sys.argv[1:]))

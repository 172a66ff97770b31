"""`python -m stacks.doctor`: each line is ok, a warning or a problem, with its fix.

The exit code is 1 if there is a problem, 2 if nothing could be checked. It only reads; its request
for a fleet is a dry run.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import boto3
import botocore
from botocore.exceptions import BotoCoreError, ClientError

from contract.aws_errors import NEWER_CLI, explain
from stacks.doctor import capacity, deployment, network
from stacks.doctor.account import Check, DeployTarget, Diagnosis, connect, ok, problem, run
from stacks.parameters import StackParameters
from stacks.parameters.context import QUALIFIER, defaults, qualifier

# In the order in which to fix them.
CHECKS: Mapping[str, Check] = {
    "bootstrap": deployment.is_bootstrapped,
    "service role": capacity.service_roles_exist,
    "size": capacity.size_is_offered,
    "quota": capacity.quota_suffices,
    "spot capacity": capacity.capacity_is_likely,
    "fleet": capacity.fleet_may_be_requested,
    "image": capacity.image_resolves,
    "prices": capacity.prices_are_new,
    "key": deployment.key_can_be_used,
    "network": network.network_can_be_used,
    "public access": network.public_access_is_allowed,
    "stack": deployment.stacks_can_be_deployed,
    "run": deployment.no_other_run_ends,
    "sweeps": deployment.sweeps_go_on,
    "buckets": deployment.buckets_can_be_used,
    "dataset": deployment.dataset_is_uploaded,
    "alarm e-mail": deployment.alarm_email_is_confirmed,
}
_IS_ON = "aws account get-region-opt-status --region us-east-1 --region-name"
_LOG_IN = f"export AWS_PROFILE=NAME   # or, {NEWER_CLI}: aws configure sso && aws sso login"

# What a fix begins with that calls AWS: it must be with the profile that was examined.
_COMMANDS = ("aws ", "npx ", "python ", "AWS_REGION=", "group=")


def examine(target: DeployTarget) -> Iterator[Diagnosis]:
    """Yield the findings one by one; only the first where AWS does not answer."""
    found = _credentials(target)
    yield found
    if found.state == "ok":
        for name, check in CHECKS.items():
            yield from run(name, check, target)


def _is_unknown(region: str) -> bool:
    session = boto3.Session()
    partitions = session.get_available_partitions()
    return not any(region in session.get_available_regions("ec2", each) for each in partitions)


def _credentials(target: DeployTarget) -> Diagnosis:
    check = "credentials"
    try:
        identity = target.client("sts").get_caller_identity()
    except (BotoCoreError, ClientError) as error:
        what = f"{explain(error) or f'cannot call AWS ({error})'}; nothing else was checked"
        fix = f"aws sts get-caller-identity --region {target.region}"
        if isinstance(error, ClientError):
            fix = _LOG_IN
        elif _is_unknown(target.region):
            what = (
                f"{target.region} is no region that botocore {botocore.__version__} knows; name "
                "another with AWS_REGION"
            )
            fix = "aws ec2 describe-regions --region us-east-1 --query 'Regions[].RegionName'"
        if "InvalidClientTokenId" in what:
            what += f" (so answers, too, a region that is off: {_IS_ON} {target.region})"
        return problem(what=what, fix=fix, check=check)
    what = f"account {identity['Account']} in {target.region} as {identity['Arn']}"
    return ok(what=what, check=check)


def main(
    arguments: Sequence[str],
    connect: Callable[[str | None], tuple[Callable[[str], Any], str]] = connect,
) -> int:
    """Print the findings as they come."""
    options = _parse(arguments)
    given = dict(pair.partition("=")[::2] for pair in options.context)
    try:
        if strange := [pair for pair in options.context if "=" not in pair]:
            raise ValueError(f"-c {strange[0]} is not NAME=VALUE")
        client, region = connect(options.profile)
        parameters = StackParameters.from_context({**defaults(), **given}, region=region)
    except (ValueError, BotoCoreError, ClientError) as mistake:
        print(f"doctor: {explain(mistake) or mistake}", file=sys.stderr)
        return 2
    target = DeployTarget(
        client=client,
        region=region,
        parameters=parameters,
        options="".join(f" -c {shlex.quote(pair)}" for pair in options.context),
        qualifier=given.get(QUALIFIER) or qualifier(),
    )
    if options.before:
        return _find_foreign(target, options.before)
    findings = []
    for found in examine(target):
        if options.profile and found.fix.startswith(_COMMANDS):
            profile = shlex.quote(options.profile)
            found = dataclasses.replace(found, fix=f"export AWS_PROFILE={profile}; {found.fix}")
        findings.append(found)
        if not options.json:
            _show(found)
    problems = sum(each.state == "problem" for each in findings)
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
    else:
        warnings = sum(each.state == "warning" for each in findings)
        print(f"\nfindings: {len(findings)}, problems: {problems}, warnings: {warnings}")
    if len(findings) == 1:  # the credentials' own
        return 2
    return int(problems > 0)


def _find_foreign(target: DeployTarget, command: str) -> int:
    """Say what stands in the way of a command of the CDK CLI; return 1 if it must not begin."""
    found = list(run("stacks", deployment.stacks_are_ours, target))
    if command == "destroy":  # which deletes the training stack only
        own = ("stacks", f"stack {target.parameters.stack_name}")
        found = [each for each in found if each.check in own]
    else:
        ends = run("run", deployment.no_other_run_ends, target)
        found += (each for each in ends if each.state == "warning")
    for each in found:
        print(f"doctor: {each.state}: {each.what}\n  $ {each.fix}", file=sys.stderr)
    return int(any(each.state == "problem" for each in found))


def _show(found: Diagnosis) -> None:
    print(f"{found.state:<9}{found.check:<19} {found.what}", flush=True)
    if found.fix:
        print(f"{'':<9}{'':<20}$ {found.fix}", flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stacks.doctor", description=__doc__)
    add = parser.add_argument
    add("-c", "--context", action="append", default=[], metavar="NAME=VALUE", help="as for cdk")
    add("--profile", help="a profile of ~/.aws/config")
    add("--json", action="store_true")
    whose = "only check whose stacks this command of the CDK CLI would change"
    add("--before", choices=("deploy", "destroy"), help=whose)
    if "--before" in arguments:  # then with the other options of that command
        return parser.parse_known_args(arguments)[0]
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

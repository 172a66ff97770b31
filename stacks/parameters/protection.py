"""Checks of what protects data (keys, logs, versions) and of whom a review's role trusts."""

import re

from stacks.parameters.checks import check_match, refuse_unless
from stacks.parameters.fields import ParameterFields

_KEY = re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[A-Za-z0-9-]+")
_OIDC_PROVIDER = re.compile(
    r"arn:aws[a-z-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com"
)
_REPOSITORY = re.compile(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+|[A-Za-z0-9-]+@\d+/[A-Za-z0-9._-]+@\d+")
# As `kms`: create a key in DatasetStack. Any other value is the ARN of an existing key.
NEW_KEY = "create"


def check_kept(p: ParameterFields) -> None:
    """Refuse protection of the buckets that this deployment cannot provide."""
    if p.kms and p.kms != NEW_KEY:
        check_match("kms", p.kms, _KEY, f"use {NEW_KEY}, the ARN of a key, or nothing")
    if not (p.dataset_bucket and p.run_bucket):
        return
    refuse_unless(
        p.kms != NEW_KEY,
        f"kms is {NEW_KEY}, which would create the key in DatasetStack, but with both buckets "
        "adopted that stack does not exist; use the ARN of a key",
    )
    refuse_unless(
        not p.access_logs,
        "access_logs is true, but both buckets are adopted; enable logging where they are "
        "managed, and drop access_logs",
    )


def check_review(p: ParameterFields) -> None:
    """Refuse only one of ReviewStack's two parameters, or trust in more than one repository."""
    given = {"oidc_provider": p.review.oidc_provider, "repository": p.review.repository}
    if not any(given.values()):
        return
    missing = [f"review.{name}" for name, value in given.items() if not value]
    refuse_unless(
        not missing,
        f"{''.join(missing)} is missing; set both of ReviewStack's parameters or neither",
    )
    advice = "use arn:aws:iam::ACCOUNT:oidc-provider/token.actions.githubusercontent.com"
    check_match("review.oidc_provider", p.review.oidc_provider, _OIDC_PROVIDER, advice)
    advice = "use OWNER/NAME, or OWNER@ID/NAME@ID, which a repository made since July 2026 needs"
    check_match("review.repository", p.review.repository, _REPOSITORY, advice)

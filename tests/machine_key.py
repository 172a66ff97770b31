"""An access key of a machine that may do anything, on an embedded AWS."""

import secrets
from dataclasses import replace

from embedded_aws import EmbeddedAws
from embedded_aws.iam.sessions import INSTANCE_KEY


def machine_key(aws: EmbeddedAws) -> str:
    """An access key with the root user's rights, whose requests are an instance's."""
    sessions, key = aws.access.sessions, f"ASIA{secrets.token_hex(8).upper()}"
    root = sessions.by_key(sessions.root_key)
    arn = f"arn:aws:ec2:{aws.region}:{aws.account}:instance/i-1"
    sessions._known[key] = replace(root, keys={**root.keys, INSTANCE_KEY: arn})
    return key

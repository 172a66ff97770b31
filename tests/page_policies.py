"""The IAM policies that pages of docs/ have for people, and the actions that calls need."""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
# IAM's name of an action where it is not the operation's.
_ACTIONS = {
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectVersions": "s3:ListBucketVersions",
    "s3:DeleteObjects": "s3:DeleteObject",
    "s3:GetBucketEncryption": "s3:GetEncryptionConfiguration",
}


def action(client: Any, operation: str, request: Any = ()) -> str:
    """The action that a boto3 client's operation needs."""
    if operation == "GetObject" and "VersionId" in request:
        return "s3:GetObjectVersion"
    name = f"{client.meta.service_model.signing_name}:{operation}"
    return _ACTIONS.get(name, name)


def policy(page: str) -> Any:
    """The one policy of a page."""
    (text,) = re.findall(r"```json\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return json.loads(text)


def allowed(page: str) -> set[str]:
    """The actions that a page's policy allows."""
    listed = [each["Action"] for each in policy(page)["Statement"]]
    return {name for each in listed for name in ([each] if isinstance(each, str) else each)}

"""Checks of AWS's that moto lacks: names, descriptions, checksums, unknown uploads.

Patterns and lengths come from AWS's own API models in botocore; those that the models lack are
here, from the API references.
"""

import base64
import functools
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import botocore.session
from moto.s3.models import s3_backends

from embedded_aws.iam.requests import read_call

_GROUP = r"[a-zA-Z0-9 ._\-:/()#,@\[\]+=&;{}!$*]{1,255}"
_MORE = {
    ("ec2", "CreateSecurityGroup"): {"GroupName": _GROUP, "GroupDescription": _GROUP},
    ("ec2", "CreateLaunchTemplate"): {"LaunchTemplateName": r"[a-zA-Z0-9()./_\-]{3,128}"},
    ("cloudwatch", "PutDashboard"): {"DashboardName": r"[a-zA-Z0-9_\-]{1,255}"},
    ("ssm", "PutParameter"): {"Name": r"[a-zA-Z0-9_.\-/]{1,2048}"},
}
_DIGESTS: Mapping[str, Callable[[bytes], bytes]] = {
    "SHA256": lambda body: hashlib.sha256(body).digest(),
    "CRC32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
}
_BUCKET = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")


def find_mistake(
    service: str, environ: Mapping[str, Any], body: bytes, account: str
) -> tuple[str, str, int] | None:
    """Return the error code, message and status of a request that AWS would refuse, or None."""
    if service == "s3":
        return _mistake_in_s3(environ, body, s3_backends[account]["aws"].buckets)
    name, values = read_call(service, environ, body)
    wanted = _patterns({"monitoring": "cloudwatch"}.get(service, service), name)
    for parameter, pattern in wanted.items():
        value = values.get(parameter)
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            code = {"ec2": "InvalidParameterValue", "iam": "ValidationError"}.get(service)
            message = (
                f"1 validation error detected: Value '{value}' at '{parameter}' failed to satisfy "
                f"constraint: Member must satisfy regular expression pattern: {pattern}"
            )
            return code or "ValidationException", message, 400
    return None


def _mistake_in_s3(
    environ: Mapping[str, Any], body: bytes, buckets: Any
) -> tuple[str, str, int] | None:
    query = parse_qs(environ.get("QUERY_STRING", ""))
    bucket, _, key = str(environ.get("PATH_INFO", "")).lstrip("/").partition("/")
    upload = query.get("uploadId", [""])[0]
    if upload and bucket in buckets and upload not in buckets[bucket].multiparts:
        return "NoSuchUpload", "The specified upload does not exist.", 404
    if environ["REQUEST_METHOD"] == "PUT" and not key and not _BUCKET.fullmatch(bucket):
        return "InvalidBucketName", "The specified bucket is not valid.", 400
    for name, digest in _DIGESTS.items() if environ["REQUEST_METHOD"] == "PUT" else ():
        said = environ.get(f"HTTP_X_AMZ_CHECKSUM_{name}")
        if said and said != base64.b64encode(digest(body)).decode():
            message = f"The {name} you specified did not match the calculated checksum."
            return "BadDigest", message, 400
    return None


@functools.cache
def _patterns(service: str, operation: str) -> Mapping[str, str]:
    if not operation.startswith(("Create", "Put")):
        return {}
    model = botocore.session.get_session().get_service_model(service)
    shape = model.operation_model(operation).input_shape
    found = {}
    for name, member in shape.members.items() if shape else ():
        pattern, longest = member.metadata.get("pattern"), member.metadata.get("max", 10**6)
        # Other strings may be JSON documents, and some patterns only Java can read.
        if member.type_name == "string" and name.endswith(("Name", "Description", "name")):
            plain = pattern if pattern and "\\p{" not in pattern else "(?s:.*)"
            found[name] = f"(?=(?s:.{{0,{longest}}})$)(?:{plain})"
    return found | _MORE.get((service, operation), {})

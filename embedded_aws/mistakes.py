"""Finds what AWS refuses and moto takes, before moto: by the models of the services, by the rows of
contract/aws_limits.toml, and by what S3 has. CloudFormation calls the same services.
"""

import base64
import gzip
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, parse_qsl

import xxhash
from botocore.exceptions import BotoCoreError
from moto.core.parse import PROTOCOL_PARSERS, RequestParserError
from moto.core.request import Request, determine_request_protocol
from moto.core.routing import get_service_router
from moto.core.utils import get_service_model
from moto.s3.models import s3_backends
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import NotFound

from contract.service_shape import violations
from embedded_aws.limits import Limits, Mistake

# The service of a signature, where botocore has another name for it.
_SERVICES = {"monitoring": "cloudwatch"}
# The code of a request that the service's model does not allow.
_INVALID = {
    "ec2": "InvalidParameterValue",
    "iam": "ValidationError",
    "sts": "ValidationError",
    "autoscaling": "ValidationError",
    "cloudwatch": "ValidationError",
    "cloudformation": "ValidationError",
    "sns": "InvalidParameter",
    "logs": "InvalidParameterException",
    "batch": "ClientException",
}
_WORDS = {
    "max": "have {} less than or equal to {}",
    "min": "have {} greater than or equal to {}",
    "enum": "satisfy enum value set: [{1}]",
    "pattern": "satisfy regular expression pattern: {1}",
}


def find_mistake(
    limits: Limits, service: str, environ: Mapping[str, Any], body: bytes, account: str
) -> Mistake | None:
    """Return how AWS refuses a request, or None."""
    service = _SERVICES.get(service, service)
    if (call := _read(service, environ, body)) is not None:
        operation, given = call
        if (refused := limits.beyond(f"{service}:{operation.name}", given)) is not None:
            return refused
        if why := beyond_model(operation.input_shape, given, is_ec2=service == "ec2"):
            code = _INVALID.get(service, "ValidationException")
            return code, f"1 validation error detected: {why}", 400
    if service == "s3":
        return _mistake_in_s3(environ, body, s3_backends[account]["aws"].buckets)
    return None


def _read(
    service: str, environ: Mapping[str, Any], body: bytes
) -> tuple[Any, Mapping[str, Any]] | None:
    """Return a request's operation and parameters, in the words of botocore's model."""
    if service != "s3" and environ.get("HTTP_CONTENT_ENCODING") == "gzip":
        body = gzip.decompress(body)
    request = Request(dict(environ), populate_request=False)
    where: dict[str, Any] = {}
    values = MultiDict(request.args)
    try:
        model = get_service_model(service)
        protocol = determine_request_protocol(model, request.content_type)
        if protocol in ("query", "ec2"):
            values.update(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
            operation = model.operation_model(values["Action"])
        elif protocol == "json":
            name = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
            operation = model.operation_model(name)
        else:
            operation, where = get_service_router(service).match(request)
        parser = PROTOCOL_PARSERS[protocol](operation)
        sent: Any = {
            "method": request.method, "values": values, "headers": request.headers, "body": body,
            "url_path": request.path, "url_params": where,
        }  # fmt: skip
        return operation, parser.parse(sent)
    # What cannot be read is for moto to refuse.
    except (BotoCoreError, RequestParserError, NotFound, KeyError, ValueError, TypeError):
        return None


def beyond_model(shape: Any, given: Any, *, is_ec2: bool = False) -> str:
    """Return the first thing that the service's model does not allow, in AWS's words, or nothing.

    EC2 has sizes before its model names them, so that its lists of names are left out.
    """
    for where, rule, limit, value in violations(shape, given) if shape else ():
        if rule in _WORDS and not (is_ec2 and rule == "enum"):
            what = "length" if isinstance(value, str | list | dict) else "value"
            must = _WORDS[rule].format(what, ", ".join(limit) if rule == "enum" else limit)
            place = re.sub(r"\[(\d+)\]", lambda item: f".{int(item[1]) + 1}.member", where)
            place = place[:1].lower() + place[1:]
            return f"Value '{value}' at '{place}' failed to satisfy constraint: Member must {must}"
    return ""


# Of CRC32C and CRC64NVME Python has none.
_DIGESTS: Mapping[str, Callable[[bytes], bytes]] = {
    "SHA256": lambda body: hashlib.sha256(body).digest(),
    "SHA512": lambda body: hashlib.sha512(body).digest(),
    "SHA1": lambda body: hashlib.sha1(body, usedforsecurity=False).digest(),
    "MD5": lambda body: hashlib.md5(body, usedforsecurity=False).digest(),
    "CRC32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
    "XXHASH64": xxhash.xxh64_digest,
    "XXHASH3": xxhash.xxh3_64_digest,
    "XXHASH128": xxhash.xxh3_128_digest,
}
_BUCKET = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")


def _mistake_in_s3(environ: Mapping[str, Any], body: bytes, buckets: Any) -> Mistake | None:
    """Return how S3 refuses a request because of what it has and what it receives, or None."""
    query = parse_qs(environ.get("QUERY_STRING", ""))
    bucket, _, key = str(environ.get("PATH_INFO", "")).lstrip("/").partition("/")
    upload = query.get("uploadId", [""])[0]
    if upload and bucket in buckets and upload not in buckets[bucket].multiparts:
        return "NoSuchUpload", "The specified upload does not exist.", 404
    if environ["REQUEST_METHOD"] == "PUT" and not key and not _BUCKET.fullmatch(bucket):
        return "InvalidBucketName", "The specified bucket is not valid.", 400
    return _wrong_checksum(environ, body) if environ["REQUEST_METHOD"] == "PUT" else None


def _wrong_checksum(environ: Mapping[str, Any], body: bytes) -> Mistake | None:
    given = {name: environ.get(f"HTTP_X_AMZ_CHECKSUM_{name}") for name in _DIGESTS}
    if "HTTP_CONTENT_MD5" in environ:
        given["MD5"] = environ["HTTP_CONTENT_MD5"]
    for name, digest in _DIGESTS.items():
        if given[name] and given[name] != base64.b64encode(digest(body)).decode():
            message = f"The {name} you specified did not match the calculated checksum."
            return "BadDigest", message, 400
    return None

"""A request in IAM's terms (words.toml): its actions, their resources, its condition keys.

If words.toml does not name an action's resource, it is *, which only a Resource of * matches.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree

from botocore.exceptions import UnknownServiceError
from moto.core.request import Request
from moto.core.routing import get_service_router
from werkzeug.exceptions import NotFound

from embedded_aws.iam.evaluation import WORDS, ApiCall

_S3_HEADERS = {"HTTP_IF_MATCH": "s3:if-match", "HTTP_IF_NONE_MATCH": "s3:if-none-match"}


def asked(
    service: str, environ: Mapping[str, Any], body: bytes, where: tuple[str, str]
) -> list[ApiCall]:
    """Return everything that a request asks for; `where` is its region and account."""
    if service == "s3":
        return list(_asked_of_s3(environ, body))
    prefix = "cloudwatch" if service == "monitoring" else service
    name, values = read_call(service, environ, body)
    action, keys = f"{prefix}:{name}", dict(_keys(prefix, name, values))
    found = [
        ApiCall(action=action, resource=resource, keys=keys)
        for resource in _resources(prefix, name, values, where)
    ]
    parameter, receiver = WORDS["passed"].get(action, ("", ""))
    if role := values.get(parameter):
        passed = {"iam:passedtoservice": f"{receiver}.amazonaws.com"}
        found.append(ApiCall(action="iam:PassRole", resource=str(role), keys=passed))
    if service == "autoscaling" and any(each.endswith(".LaunchTemplateId") for each in values):
        # Auto Scaling asks EC2 whether the caller could start the group's instances.
        instances = f"arn:aws:ec2:{where[0]}:{where[1]}:instance/*"
        found.append(ApiCall(action="ec2:RunInstances", resource=instances, keys={}))
    return found


def read_call(
    service: str, environ: Mapping[str, Any], body: bytes
) -> tuple[str, Mapping[str, Any]]:
    """Return the operation of a request (not to S3), and its parameters as they were sent."""
    if environ.get("HTTP_CONTENT_ENCODING") == "gzip":
        body = gzip.decompress(body)
    if target := str(environ.get("HTTP_X_AMZ_TARGET", "")).rpartition(".")[2]:
        return target, json.loads(body or b"{}")
    sent = body.decode(errors="replace") + "&" + environ.get("QUERY_STRING", "")
    form = {name: values[0] for name, values in parse_qs(sent).items()}
    if "Action" in form:
        return form["Action"], form
    try:
        request = Request(dict(environ), populate_request=False)
        operation, values = get_service_router(service).match(request)
    except (NotFound, UnknownServiceError):
        return "", {}
    return operation.name, {**values, **(json.loads(body) if body[:1] == b"{" else {})}


def _resources(
    service: str, name: str, values: Mapping[str, Any], where: tuple[str, str]
) -> list[str]:
    region, account = where
    found = []
    if service == "ec2" and not name.startswith("Describe"):
        for parameter, value in values.items():
            kind = WORDS["ec2"].get(str(value).partition("-")[0])
            if kind and re.search(r"Id(\.\d+)?$", parameter):
                found.append(f"arn:aws:ec2:{region}:{account}:{kind}/{value}")
    base = f"arn:aws:{service}:{'' if service in ('iam', 'sts') else region}:{account}"
    names = {} if (service, name[:8]) == ("autoscaling", "Describe") else WORDS["named"]
    for parameter, form in names.get(service, {}).items():
        given = values.get(parameter, [])
        for each in given if isinstance(given, list) else [given]:
            named = f"{base}:{form.format(str(each).lstrip('/'))}"
            found.append(each if str(each).startswith("arn:") else named)
        if found:
            break
    return found or ["*"]


def _keys(service: str, name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if service == "cloudwatch" and "Namespace" in values:
        yield "cloudwatch:namespace", values["Namespace"]
    if service == "autoscaling":
        for parameter in {"ForceDelete", "MaxSize", "MinSize"} & set(values):
            yield f"autoscaling:{parameter.lower()}", values[parameter]
    if service == "sts":
        for parameter in {"ExternalId", "RoleSessionName"} & set(values):
            yield f"sts:{parameter.lower()}", values[parameter]
    if service == "ec2" and name.startswith("Modify"):
        yield from ((f"ec2:attribute/{key.lower()}", value) for key, value in values.items())
    tags = [key for key in values if re.search(r"\bTag\.\d+\.Key$", key)]
    if service == "ec2" and tags:
        yield "aws:tagkeys", tuple(values[key] for key in tags)
        for key in tags:
            yield f"aws:requesttag/{values[key].lower()}", values.get(key[:-3] + "Value", "")


def _asked_of_s3(environ: Mapping[str, Any], body: bytes) -> Iterator[ApiCall]:
    bucket, _, key = unquote(environ.get("PATH_INFO", "")).lstrip("/").partition("/")
    sent = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    query = {name: values[0] for name, values in sent.items()}
    method, arn = environ["REQUEST_METHOD"], f"arn:aws:s3:::{bucket}"
    names = {"prefix", "delimiter", "max-keys", "versionId"} & set(query)
    keys = {f"s3:{name.lower()}": query[name] for name in names}
    for header, value in environ.items():
        if header in _S3_HEADERS:
            keys[_S3_HEADERS[header]] = value
        elif header.startswith("HTTP_X_AMZ_"):
            keys["s3:" + header[5:].lower().replace("_", "-")] = value
    if key:
        action = f"s3:{_object_action(method, query)}"
        yield ApiCall(action=action, resource=f"{arn}/{key}", keys=keys)
        if source := environ.get("HTTP_X_AMZ_COPY_SOURCE"):
            copied = f"arn:aws:s3:::{unquote(source).lstrip('/').partition('?')[0]}"
            yield ApiCall(action="s3:GetObject", resource=copied, keys=keys)
    elif method == "POST" and "delete" in query:
        for each in ElementTree.fromstring(body).findall("{*}Object"):
            version = "Version" if each.find("{*}VersionId") is not None else ""
            name = each.findtext("{*}Key", "")
            yield ApiCall(action=f"s3:DeleteObject{version}", resource=f"{arn}/{name}", keys=keys)
    elif bucket:
        yield ApiCall(action=f"s3:{_bucket_action(method, query)}", resource=arn, keys=keys)
    else:
        yield ApiCall(action="s3:ListAllMyBuckets", resource="*")


def _object_action(method: str, query: Mapping[str, str]) -> str:
    version = "Version" if "versionId" in query else ""
    verb = {"HEAD": "Get", "POST": "Put"}.get(method, method.capitalize())
    if subresource := next(iter({"tagging", "acl"} & set(query)), ""):
        return f"{verb}Object{version}{subresource.capitalize()}"
    if "uploadId" in query and verb in ("Get", "Delete"):
        return "ListMultipartUploadParts" if verb == "Get" else "AbortMultipartUpload"
    return "PutObject" if verb == "Put" else f"{verb}Object{version}"


def _bucket_action(method: str, query: Mapping[str, str]) -> str:
    for subresource, name in WORDS["s3"].items():
        if subresource in query:
            if method == "DELETE" and subresource == "policy":
                return "DeleteBucketPolicy"
            return f"{'Get' if method == 'GET' else 'Put'}{name}"
    if method in ("GET", "HEAD"):
        lists = WORDS["s3_lists"].items()
        return next((name for subresource, name in lists if subresource in query), "ListBucket")
    return "DeleteBucket" if method == "DELETE" else "CreateBucket"

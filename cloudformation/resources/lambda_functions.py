"""Lambda functions and the permissions to call them."""

import io
import zipfile
from typing import Any

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, deletes, finds, retag

_CODE = ("S3Bucket", "S3Key", "S3ObjectVersion")


def _create(request: HandlerRequest) -> Provisioned:
    name = request.get("FunctionName") or request.generated_name(longest=64)
    made = call(request, "lambda", "create_function", FunctionName=name, Code=_code(request))
    return Provisioned(id=name, attributes={"Arn": made["FunctionArn"]})


def _code(request: HandlerRequest) -> dict[str, Any]:
    code = request.properties["Code"]
    if "ZipFile" not in code:
        return {name: code[name] for name in _CODE if name in code}
    # In a template, ZipFile is the source itself, which becomes a file named index.
    suffix = "py" if str(request.get("Runtime", "")).startswith("python") else "js"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"index.{suffix}"), code["ZipFile"])
    return {"ZipFile": packed.getvalue()}


def _configure(request: HandlerRequest) -> None:
    if not request.old:
        return
    name = request.physical_id
    if request.changed("Code") or request.changed("Architectures"):
        call(request, "lambda", "update_function_code", FunctionName=name, **_code(request))
    call(request, "lambda", "update_function_configuration", FunctionName=name)
    retag(request, "lambda", Resource=request.attributes["Arn"])


def _allow(request: HandlerRequest) -> Provisioned:
    statement = request.generated_name(longest=100)
    call(request, "lambda", "add_permission", StatementId=statement)
    return Provisioned(id=statement, attributes={"Id": statement})


TYPES: Registry = {
    "AWS::Lambda::Function": ResourceType(
        create=_create,
        configure=_configure,
        delete=deletes("lambda", "delete_function", by="FunctionName"),
        exists=finds("lambda", "get_function", by="FunctionName"),
    ),
    "AWS::Lambda::Permission": ResourceType(
        create=_allow,
        delete=deletes("lambda", "remove_permission", "FunctionName", by="StatementId"),
        exists=finds(
            "lambda",
            "get_policy",
            "FunctionName",
            where=lambda request, found: f'"{request.physical_id}"' in found["Policy"],
        ),
    ),
}

"""Lambda functions and the permissions to call them."""

import io
import zipfile
from typing import Any

from cloudformation.intrinsics import scalar
from cloudformation.resource import Provisioned, Registry, ResourceRequest, ResourceType
from cloudformation.resources.lookups import deletes, finds, look_up

_SETTINGS = ("Description", "Environment", "Handler", "KMSKeyArn", "Layers", "LoggingConfig",
             "MemorySize", "Role", "Runtime", "Timeout", "TracingConfig", "VpcConfig",
             "EphemeralStorage", "DeadLetterConfig")  # fmt: skip
_CODE = ("S3Bucket", "S3Key", "S3ObjectVersion")


def _create(request: ResourceRequest) -> Provisioned:
    name = request.get("FunctionName") or request.generated_name(longest=64)
    tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
    made = request.client("lambda").create_function(
        FunctionName=name,
        Code=_code(request),
        Tags=tags,
        **request.pick("Architectures", "PackageType"),
        **_settings(request),
    )
    return Provisioned(id=name, attributes={"Arn": made["FunctionArn"]})


def _settings(request: ResourceRequest) -> dict[str, Any]:
    settings = request.pick(*_SETTINGS)
    variables = settings.get("Environment", {}).get("Variables", {})
    if variables:
        # The schema allows numbers; an environment holds only text.
        text = {name: scalar(value) for name, value in variables.items()}
        settings["Environment"] = {"Variables": text}
    return settings


def _code(request: ResourceRequest) -> dict[str, Any]:
    code = request.properties["Code"]
    if "ZipFile" not in code:
        return {name: code[name] for name in _CODE if name in code}
    # In a template, ZipFile is the source itself, which becomes a file named index.
    suffix = "py" if str(request.get("Runtime", "")).startswith("python") else "js"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"index.{suffix}"), code["ZipFile"])
    return {"ZipFile": packed.getvalue()}


def _update(request: ResourceRequest) -> Provisioned:
    client, name = request.client("lambda"), request.physical_id
    if request.changed("Code") or request.changed("Architectures"):
        client.update_function_code(
            FunctionName=name, **_code(request), **request.pick("Architectures")
        )
    client.update_function_configuration(FunctionName=name, **_settings(request))
    if request.changed("Tags"):
        old = {tag["Key"] for tag in request.old.get("Tags", [])}
        new = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
        arn = request.attributes["Arn"]
        if old - set(new):
            client.untag_resource(Resource=arn, TagKeys=sorted(old - set(new)))
        if new:
            client.tag_resource(Resource=arn, Tags=new)
    return Provisioned(id=name, attributes=request.attributes)


def _allow(request: ResourceRequest) -> Provisioned:
    statement = request.generated_name(longest=100)
    request.client("lambda").add_permission(
        StatementId=statement,
        **request.pick("Action", "FunctionName", "Principal", "SourceArn", "SourceAccount",
                    "EventSourceToken", "PrincipalOrgID", "FunctionUrlAuthType"),
    )  # fmt: skip
    return Provisioned(id=statement, attributes={"Id": statement})


def _permission_exists(request: ResourceRequest) -> bool:
    found = look_up(
        request.client("lambda").get_policy, FunctionName=request.properties["FunctionName"]
    )
    return found is not None and f'"{request.physical_id}"' in found["Policy"]


TYPES: Registry = {
    "AWS::Lambda::Function": ResourceType(
        create=_create,
        update=_update,
        delete=deletes("lambda", "delete_function", "FunctionName"),
        exists=finds("lambda", "get_function", "FunctionName"),
    ),
    "AWS::Lambda::Permission": ResourceType(
        create=_allow,
        delete=lambda request: request.client("lambda").remove_permission(
            FunctionName=request.properties["FunctionName"], StatementId=request.physical_id
        ),
        exists=_permission_exists,
    ),
}

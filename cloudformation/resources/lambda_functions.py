"""Lambda functions and the permissions to call them."""

import io
import zipfile
from typing import Any

from cloudformation.intrinsics import scalar
from cloudformation.resource import Made, Registry, ResourceType, Wish
from cloudformation.resources.asking import ask, known

_SETTINGS = ("Description", "Environment", "Handler", "KMSKeyArn", "Layers", "LoggingConfig",
             "MemorySize", "Role", "Runtime", "Timeout", "TracingConfig", "VpcConfig",
             "EphemeralStorage", "DeadLetterConfig")  # fmt: skip
_CODE = ("S3Bucket", "S3Key", "S3ObjectVersion")


def _create(wish: Wish) -> Made:
    name = wish.get("FunctionName") or wish.generated_name(longest=64)
    tags = {tag["Key"]: tag["Value"] for tag in wish.get("Tags", [])}
    made = wish.client("lambda").create_function(
        FunctionName=name,
        Code=_code(wish),
        Tags=tags,
        **wish.pick("Architectures", "PackageType"),
        **_settings(wish),
    )
    return Made(id=name, attributes={"Arn": made["FunctionArn"]})


def _settings(wish: Wish) -> dict[str, Any]:
    settings = wish.pick(*_SETTINGS)
    variables = settings.get("Environment", {}).get("Variables", {})
    if variables:
        # The schema lets numbers through; an environment knows text only.
        text = {name: scalar(value) for name, value in variables.items()}
        settings["Environment"] = {"Variables": text}
    return settings


def _code(wish: Wish) -> dict[str, Any]:
    code = wish.properties["Code"]
    if "ZipFile" not in code:
        return {name: code[name] for name in _CODE if name in code}
    # In a template ZipFile is the source itself, which becomes a file named index.
    suffix = "py" if str(wish.get("Runtime", "")).startswith("python") else "js"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"index.{suffix}"), code["ZipFile"])
    return {"ZipFile": packed.getvalue()}


def _update(wish: Wish) -> Made:
    client, name = wish.client("lambda"), wish.physical_id
    if wish.changed("Code") or wish.changed("Architectures"):
        client.update_function_code(FunctionName=name, **_code(wish), **wish.pick("Architectures"))
    client.update_function_configuration(FunctionName=name, **_settings(wish))
    if wish.changed("Tags"):
        old = {tag["Key"] for tag in wish.old.get("Tags", [])}
        new = {tag["Key"]: tag["Value"] for tag in wish.get("Tags", [])}
        arn = wish.attributes["Arn"]
        if old - set(new):
            client.untag_resource(Resource=arn, TagKeys=sorted(old - set(new)))
        if new:
            client.tag_resource(Resource=arn, Tags=new)
    return Made(id=name, attributes=wish.attributes)


def _allow(wish: Wish) -> Made:
    statement = wish.generated_name(longest=100)
    wish.client("lambda").add_permission(
        StatementId=statement,
        **wish.pick("Action", "FunctionName", "Principal", "SourceArn", "SourceAccount",
                    "EventSourceToken", "PrincipalOrgID", "FunctionUrlAuthType"),
    )  # fmt: skip
    return Made(id=statement, attributes={"Id": statement})


def _permission_exists(wish: Wish) -> bool:
    found = ask(wish.client("lambda").get_policy, FunctionName=wish.properties["FunctionName"])
    return found is not None and f'"{wish.physical_id}"' in found["Policy"]


TYPES: Registry = {
    "AWS::Lambda::Function": ResourceType(
        create=_create,
        update=_update,
        delete=lambda wish: wish.client("lambda").delete_function(FunctionName=wish.physical_id),
        exists=lambda wish: known(
            wish.client("lambda").get_function, FunctionName=wish.physical_id
        ),
    ),
    "AWS::Lambda::Permission": ResourceType(
        create=_allow,
        delete=lambda wish: wish.client("lambda").remove_permission(
            FunctionName=wish.properties["FunctionName"], StatementId=wish.physical_id
        ),
        exists=_permission_exists,
    ),
}

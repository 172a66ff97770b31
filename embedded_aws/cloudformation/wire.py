"""CloudFormation's wire format (AWS query): a form in, XML out, with moto's parser, serializer."""

import uuid
from typing import Any

from botocore import xform_name
from moto.core.parse import QueryParser
from moto.core.serialize import QuerySerializer, SerializationContext
from moto.core.utils import get_service_model
from werkzeug.datastructures import MultiDict
from werkzeug.wrappers import Request, Response

from embedded_aws.cloudformation.errors import CloudFormationError


def answer(request: Request, service: object) -> Response:
    """Call the service's method that the request names; return its result or error as XML."""
    values = request.values
    model = get_service_model("cloudformation")
    action = values.get("Action", "")
    if action not in model.operation_names:
        action = "DescribeStacks"
        result: Any = CloudFormationError(
            f"Could not find operation {values.get('Action')}", "InvalidAction"
        )
    else:
        result = _run(model.operation_model(action), values, service)
    context = SerializationContext(request_id=str(uuid.uuid4()))
    serialized = QuerySerializer(model.operation_model(action), context).serialize(result)
    return Response(
        serialized["body"], status=serialized["status_code"], headers=serialized["headers"]
    )


def _run(model: Any, values: MultiDict[str, str], service: object) -> Any:
    operation = getattr(service, xform_name(model.name), None)
    if operation is None:
        return CloudFormationError(
            f"The embedded AWS has no CloudFormation operation {model.name}", "InvalidAction"
        )
    parsed = QueryParser(model).parse({"values": values})  # type: ignore[typeddict-item]
    try:
        return operation(parsed) or {}
    except CloudFormationError as error:
        return error

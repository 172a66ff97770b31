"""CloudFormation's wire format (AWS query): a form in, XML out, by moto's parser and serializer."""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from moto.core.parse import QueryParser
from moto.core.serialize import QuerySerializer, SerializationContext
from moto.core.utils import get_service_model
from werkzeug.datastructures import MultiDict
from werkzeug.wrappers import Request, Response

from cloudformation.errors import CloudFormationError

Operation = Callable[[dict[str, Any]], dict[str, Any] | None]


def answer(request: Request, operations: Mapping[str, Operation]) -> Response:
    """Run the operation that the request names; return its result or its error as XML."""
    values = request.values
    model = get_service_model("cloudformation")
    action = values.get("Action", "")
    if action not in model.operation_names:
        action = "DescribeStacks"
        result: Any = CloudFormationError(
            f"Could not find operation {values.get('Action')}", "InvalidAction"
        )
    else:
        result = _run(model.operation_model(action), values, operations)
    context = SerializationContext(request_id=str(uuid.uuid4()))
    serialized = QuerySerializer(model.operation_model(action), context).serialize(result)
    return Response(
        serialized["body"], status=serialized["status_code"], headers=serialized["headers"]
    )


def _run(model: Any, values: MultiDict[str, str], operations: Mapping[str, Operation]) -> Any:
    operation = operations.get(model.name)
    if operation is None:
        return CloudFormationError(
            f"The embedded AWS has no CloudFormation operation {model.name}", "InvalidAction"
        )
    parsed = QueryParser(model).parse({"values": values})  # type: ignore[typeddict-item]
    try:
        return operation(parsed) or {}
    except CloudFormationError as error:
        return error

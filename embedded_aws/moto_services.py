"""moto's services behind one function, which routes by the service that a request is signed for.

moto's own server does this with one Flask application per service; this needs only Werkzeug.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from xml.sax.saxutils import escape

from moto import backends
from moto.backend_index import backend_url_patterns
from moto.core.base_backend import BackendDict
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.request import Request
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

# The hosts of services whose host does not follow from the signing name.
_HOSTS = {"iam": "iam.amazonaws.com", "sts": "sts.amazonaws.com"}
Method = Callable[[Any, str, Any], Any]


class ServerRequest(Request):
    """A request that came over HTTP, to whose response the server adds the Date header."""

    from_wsgi_server = True


def moto_services(environ: dict[str, Any]) -> Response:
    """Handle a request as the service that it is signed for; unsigned ones go to S3 or STS."""
    service, region = signed_for(environ)
    # moto reads service, region and bucket from the URL, so it gets the URL used on AWS.
    environ["HTTP_HOST"] = _HOSTS.get(service, f"{service}.{region}.amazonaws.com")
    environ["wsgi.url_scheme"] = "https"
    # The request is not stored in its own environment: that cycle would keep bodies of 64 MB in
    # memory until the garbage collector runs.
    request = ServerRequest(environ, populate_request=False)
    method = _find(request.url_root.rstrip("/"), request.raw_path)
    if method is None:
        what = f"the embedded AWS does not have the service {service}"
        return answer_error(service, environ, "NotImplemented", what, 501)
    return _run(method, request, service)


def signed_for(environ: Mapping[str, Any]) -> tuple[str, str]:
    """Return service and region of a request's SigV4 credential, in its header or query."""
    given = environ.get("HTTP_AUTHORIZATION", "") + "&" + environ.get("QUERY_STRING", "")
    found = re.search(r"Credential=[^/%]+(?:/|%2F)\d+(?:/|%2F)([\w-]+)(?:/|%2F)([\w.-]+)", given)
    if found:
        return found.group(2).lower(), found.group(1)
    # A web identity asks STS for a session without a signature.
    is_form = "x-www-form-urlencoded" in environ.get("CONTENT_TYPE", "")
    return "sts" if is_form else "s3", "us-east-1"


def _run(method: Method, request: ServerRequest, service: str) -> Response:
    try:
        status, headers, body = method(request, request.raw_url, request.headers)
    except HTTPException as error:
        status, headers, body = error.code, error.get_headers(), error.get_body()
    except NotImplementedError as error:
        return answer_error(service, request.environ, "NotImplemented", str(error), 501)
    response = Response(body, status=status, headers=headers)
    if request.method == "HEAD" and "content-length" in headers:
        response.headers["Content-Length"] = headers["content-length"]
    return response


# Their requests may have no body, or one that is not JSON; their answers are.
_REST_JSON = ("batch", "lambda")


def is_in_json(service: str, environ: Mapping[str, Any]) -> bool:
    """Whether a request's answer is in JSON rather than XML."""
    # An object of S3 may be JSON; what S3 says is XML.
    is_json = service != "s3" and "json" in environ.get("CONTENT_TYPE", "")
    return is_json or service in _REST_JSON


def answer_error(
    service: str, environ: Mapping[str, Any], code: str, message: str, status: int
) -> Response:
    """Return an error in the service's format."""
    if is_in_json(service, environ):
        content = json.dumps({"__type": code, "message": message})
        # Errors of JSON services, including denials, have status 400.
        status = status if status >= 500 or service in _REST_JSON else 400
        return Response(content, status=status, content_type="application/x-amz-json-1.1")
    error = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    if service == "ec2":
        text = f"<Response><Errors>{error}</Errors><RequestID>refused</RequestID></Response>"
    elif service == "s3":
        text = error
    else:
        text = f"<ErrorResponse>{error}<RequestId>refused</RequestId></ErrorResponse>"
    return Response(text, status=status, content_type="text/xml")


def _find(root: str, path: str) -> Method | None:
    for service, pattern in backend_url_patterns:
        if pattern.match(root):
            for url, method in _methods(service):
                if url.match(root + path):
                    return method
    return None


@functools.cache
def _methods(service: Any) -> list[tuple[re.Pattern[str], Method]]:
    found = backends.get_backend(service)
    if isinstance(found, BackendDict):
        regions = found[DEFAULT_ACCOUNT_ID]
        backend = regions["us-east-1"] if "us-east-1" in regions else regions["aws"]
    else:
        backend = found["global"]
    return [(re.compile(url), method) for url, method in backend.urls.items()]

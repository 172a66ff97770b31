"""The instance metadata service of one rehearsed instance: IMDSv2 on a port of 127.0.0.1.

It supports only version 2, as the launch template requires: without a token every path is 401.
Unknown paths are 404, including notices and recommendations until they are announced. Its times are
those of AWS's clock.
"""

import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from embedded_aws import FaultInjector

TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
MAX_TOKEN_TTL_SECONDS = 21600
CREDENTIALS_SECONDS = 6 * 3600
# "latest" and dates of API versions: cloud-init requests the dates.
VERSION = r"/(?:latest|\d{4}-\d{2}-\d{2})/"
ACTION = "meta-data/spot/instance-action"
TERMINATION = "meta-data/spot/termination-time"
REBALANCE = "meta-data/events/recommendations/rebalance"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """The credentials that the service returns for the instance's role."""

    access_key_id: str = field(default_factory=lambda: "ASIA" + secrets.token_hex(8).upper())
    secret_access_key: str = field(default_factory=lambda: secrets.token_urlsafe(30))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(60))


class QuietServer(ThreadingHTTPServer):
    """An HTTP server that prints no traceback when a client hangs up."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up, as those of a killed machine do."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedInstance:
    """One instance as EC2 describes it."""

    id: str
    type: str = "g5.xlarge"
    image_id: str = "ami-0123456789abcdef0"
    zone: str = "us-east-1a"
    market: str = "spot"
    tags: Mapping[str, str] = field(default_factory=dict)
    user_data: bytes = b""


@dataclass(kw_only=True, slots=True)
class MetadataServer:
    """Serves from `start` to `close`; `notice` and `rebalance` may be called at any time."""

    instance: RehearsedInstance
    account: str = "123456789012"
    role: str = "TrainingInstanceRole"
    credentials: Credentials = field(default_factory=Credentials)
    # Further entries below meta-data/: name -> value.
    more: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    faults: FaultInjector = field(default_factory=FaultInjector)
    _tokens: dict[str, float] = field(default_factory=dict)
    _announced: dict[str, str] = field(default_factory=dict)
    _server: QuietServer | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> "MetadataServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start serving on a free port."""
        handler = type("Handler", (MetadataHandler,), {"metadata": self})
        self._server = QuietServer(("127.0.0.1", 0), handler)
        # The poll interval decides how long close takes.
        serve = {"poll_interval": 0.05}
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs=serve, name="metadata", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = self._thread = None

    @property
    def endpoint(self) -> str:
        """The value for AWS_EC2_METADATA_SERVICE_ENDPOINT."""
        if self._server is None:
            raise ValueError(f"the metadata of {self.instance.id} is not served; call start()")
        return f"http://127.0.0.1:{self._server.server_port}"

    def notice(self, seconds: float) -> datetime:
        """Announce that the instance will be terminated in `seconds`; return that time."""
        when = self._now() + timedelta(seconds=seconds)
        text = f"{when:%Y-%m-%dT%H:%M:%SZ}"
        self._announced[TERMINATION] = text
        self._announced[ACTION] = json.dumps({"action": "terminate", "time": text})
        return when

    def rebalance(self) -> None:
        """Announce a rebalance recommendation."""
        self._announced[REBALANCE] = json.dumps({"noticeTime": f"{self._now():%Y-%m-%dT%H:%M:%SZ}"})

    def issue_token(self, ttl_seconds: int) -> str:
        """Issue a token that is valid for `ttl_seconds`."""
        token = secrets.token_urlsafe(32)
        self._tokens[token] = self.clock() + ttl_seconds
        return token

    def knows(self, token: str | None) -> bool:
        """Whether the token was issued here and has not expired."""
        return token is not None and self.clock() < self._tokens.get(token, 0.0)

    def look_up(self, path: str) -> bytes | None:
        """Return the content at a path below the version, a listing of a folder, or None."""
        content = self._content()
        if path in content:
            return content[path]
        # A folder lists each child once; a child that is a folder itself ends in /.
        folder = f"{path.rstrip('/')}/"
        below = [name.removeprefix(folder) for name in content if name.startswith(folder)]
        children = dict.fromkeys(name.partition("/")[0] + "/" * ("/" in name) for name in below)
        return "\n".join(children).encode() if children else None

    def _now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.faults.clock_ahead_seconds)

    def _content(self) -> dict[str, bytes]:
        region = self.instance.zone.rstrip("abcdefghijklmnopqrstuvwxyz")
        role = f"iam/security-credentials/{self.role}"
        meta_data = {
            "ami-id": self.instance.image_id,
            "instance-id": self.instance.id,
            "instance-life-cycle": self.instance.market,
            "instance-type": self.instance.type,
            "placement/availability-zone": self.instance.zone,
            "placement/region": region,
            "services/domain": "amazonaws.com",
            "iam/info": self._role_info(),
            role: self._credentials(),
            **{f"tags/instance/{name}": value for name, value in self.instance.tags.items()},
            **self.more,
        }
        content = {f"meta-data/{name}": value for name, value in meta_data.items()}
        content["dynamic/instance-identity/document"] = self._identity(region)
        content |= self._announced
        encoded = {name: value.encode() for name, value in content.items()}
        user_data = self.instance.user_data
        return encoded | ({"user-data": user_data} if user_data else {})

    def _role_info(self) -> str:
        arn = f"arn:aws:iam::{self.account}:instance-profile/{self.role}"
        return json.dumps({"Code": "Success", "InstanceProfileArn": arn})

    def _credentials(self) -> str:
        now = self._now()
        return json.dumps(
            {
                "Code": "Success",
                "LastUpdated": f"{now:%Y-%m-%dT%H:%M:%SZ}",
                "Type": "AWS-HMAC",
                "AccessKeyId": self.credentials.access_key_id,
                "SecretAccessKey": self.credentials.secret_access_key,
                "Token": self.credentials.token,
                "Expiration": f"{now + timedelta(seconds=CREDENTIALS_SECONDS):%Y-%m-%dT%H:%M:%SZ}",
            }
        )

    def _identity(self, region: str) -> str:
        return json.dumps(
            {
                "accountId": self.account,
                "architecture": "x86_64",
                "availabilityZone": self.instance.zone,
                "imageId": self.instance.image_id,
                "instanceId": self.instance.id,
                "instanceType": self.instance.type,
                "region": region,
                "version": "2017-09-30",
            }
        )


class MetadataHandler(BaseHTTPRequestHandler):
    """Answers with the metadata of one instance."""

    metadata: MetadataServer

    def do_PUT(self) -> None:
        """Issue a token, except to a request through a proxy, as on EC2."""
        if self._meets_fault():
            return None
        if not re.fullmatch(f"{VERSION}api/token", self.path):
            return self._answer(404)
        if self.headers.get("X-Forwarded-For") is not None:
            return self._answer(403)
        ttl = self.headers.get(TTL_HEADER, "")
        if not ttl.isdecimal() or not 1 <= int(ttl) <= MAX_TOKEN_TTL_SECONDS:
            return self._answer(400)
        token = self.metadata.issue_token(int(ttl))
        return self._answer(200, token.encode(), {TTL_HEADER: ttl})

    def do_GET(self) -> None:
        """Return one path to a client with a token."""
        if self._meets_fault():
            return None
        if not self.metadata.knows(self.headers.get(TOKEN_HEADER)):
            return self._answer(401)
        prefix = re.match(VERSION, self.path)
        found = self.metadata.look_up(self.path[prefix.end() :]) if prefix else None
        return self._answer(404) if found is None else self._answer(200, found)

    def _meets_fault(self) -> bool:
        """Whether a drill's fault has answered or dropped this request."""
        path = re.sub(VERSION, "", self.path, count=1)
        fault = self.metadata.faults.meet(f"metadata:{self.command.capitalize()}", path)
        if fault is None or fault.delay_seconds:
            return False
        self.close_connection = True
        if fault.status:
            self._answer(fault.status)
        return True

    def log_message(self, *_: object) -> None:
        """Log nothing: every machine sends about one request per second."""

    def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

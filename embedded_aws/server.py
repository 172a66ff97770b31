"""`EmbeddedAws`: an AWS account in this process, for the real CDK CLI, boto3 and aws CLI.

It is moto 5.2.5 with our own CloudFormation, IAM and Spot fleets; docs/rehearsal.md lists what it
does not do.
"""

import errno
import shlex
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any, Self
from urllib.request import getproxies_environment

from moto.core.config import default_user_config
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.moto_api._internal.models import moto_api_backend
from moto.ssm.models import ssm_backends
from moto.sts.models import AssumedRole
from werkzeug.serving import BaseWSGIServer, make_server

from embedded_aws import fleet, moto_patches
from embedded_aws.capacity import Capacity, ServiceEvent
from embedded_aws.cloudformation import schema
from embedded_aws.cloudformation.account import RegionalAccount
from embedded_aws.cloudformation.engine import Engine
from embedded_aws.cloudformation.resources import REGISTRY
from embedded_aws.cloudformation.service import CloudFormation
from embedded_aws.front import Front
from embedded_aws.iam.access import AccessControl
from embedded_aws.iam.sessions import INSTANCE_KEY
from embedded_aws.images import offer_images
from embedded_aws.job_network import QuietHandler
from embedded_aws.limits import Limits
from embedded_aws.service_jobs import ServiceJobs
from embedded_aws.service_models import new_client

HOST = "127.0.0.1"
# The running account of this process, at most one: moto's state is global.
_RUNNING: list["EmbeddedAws"] = []


class PortInUse(ValueError):
    """The requested port, on which another program listens."""


class EmbeddedAws:
    """An AWS account on a local port, empty at each start; a context manager.

    `spot_usd` returns a size's Spot price in dollars per hour, or raises ValueError for a size that
    it does not know; those have moto's price, as have all by default.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        region: str = "us-east-1",
        spot_usd: Callable[[str], float] | None = None,
    ) -> None:
        self.port = port
        self.region = region
        self.account = DEFAULT_ACCOUNT_ID
        self._spot_usd = spot_usd
        self._clients: dict[tuple[str, str], Any] = {}
        self._stack_sessions: dict[str, AssumedRole] = {}
        self._lock = threading.Lock()
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, port: int | None = None) -> None:
        """Listen on the port (0: a free one), with an account that has only the DLAMIs."""
        if _RUNNING:
            raise ValueError("an embedded AWS is already running in this process; stop it first")
        listener = _listen(self.port if port is None else port)
        self.port = listener.getsockname()[1]
        default_user_config["lambda"] = {"use_docker": False}
        default_user_config["iam"] = {"load_aws_managed_policies": True}
        moto_api_backend.reset()
        moto_patches.install()
        account = RegionalAccount(id=self.account, region=self.region, client=self.client)
        self.engine = Engine(account, REGISTRY)
        self.capacity = fleet.CAPACITY[0] = Capacity(spot_usd=self._spot_usd)
        self.access = AccessControl(
            account=self.account, region=self.region, stacks=lambda: self.engine.stacks.values()
        )
        fleet.ACCESS[0] = self.access
        # The WSGI application may be served at other addresses too; instances, the Guard and
        # submitters of jobs meet its faults.
        self.application = Front(CloudFormation(self.engine), self.access)
        self.faults = self.application.faults
        self.application.limits = Limits(self.client)
        self.application.jobs = self.service_jobs = ServiceJobs(
            self.access, self.environment, self.application
        )
        self._server = make_server(
            HOST, self.port, self.application, threaded=True, request_handler=QuietHandler,
            fd=listener.fileno(),
        )  # fmt: skip
        listener.close()  # the server has its own copy of the descriptor
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()
        _RUNNING.append(self)
        offer_images(self.client("ec2"), ssm_backends[self.account][self.region], self.account)

    def stop(self) -> None:
        """Wait for running deployments, stop listening and forget everything."""
        if self._server is None or self._thread is None:
            return
        self.service_jobs.stop()
        self.engine.join(timeout_seconds=10)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = None
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._stack_sessions.clear()
        moto_patches.uninstall()
        fleet.ACCESS[0] = None
        fleet.CAPACITY[0] = Capacity()
        # Otherwise the reset would read 1,500 managed policies that are no longer needed.
        default_user_config["iam"] = {"load_aws_managed_policies": False}
        moto_api_backend.reset()
        _RUNNING.remove(self)

    @property
    def endpoint(self) -> str:
        # With an address rather than a name, SDKs put the bucket into the path.
        return f"http://{HOST}:{self.port}"

    def environment(self) -> dict[str, str]:
        """Return the variables that point the CDK CLI, the aws CLI and boto3 here, past a proxy."""
        direct = getproxies_environment().get("no", "")
        if direct != "*" and HOST not in direct.replace(" ", "").split(","):
            direct = f"{direct},{HOST}".lstrip(",")
        return {
            **dict.fromkeys(("NO_PROXY", "no_proxy"), direct),
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access.sessions.root_key,
            "AWS_SECRET_ACCESS_KEY": "embedded",
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def exports(self) -> str:
        """Return the variables as lines of a shell script, which first unsets all other AWS_ ones.

        A service's own endpoint, FIPS or ignored endpoints would lead past this AWS, to a real one.
        """
        forget = "unset AWS_PROFILE $(env | grep -o '^AWS_[A-Z0-9_]*')\n"
        own = self.environment().items()
        return forget + "".join(f"export {k}={shlex.quote(v)}\n" for k, v in own)

    def client(self, service: str, role_arn: str = "") -> Any:
        """Return a boto3 client of the root user, or of CloudFormation in a role's session.

        Clients are shared, as they are thread-safe.
        """
        with self._lock:
            if (service, role_arn) not in self._clients:
                self._clients[service, role_arn] = self._new_client(service, role_arn)
            return self._clients[service, role_arn]

    def _new_client(self, service: str, role_arn: str) -> Any:
        key, token = self.access.sessions.root_key, None
        if role_arn:
            if role_arn not in self._stack_sessions:
                self._stack_sessions[role_arn] = self.access.assume(
                    role_arn,
                    service="cloudformation",
                    source_arn=f"arn:aws:cloudformation:{self.region}:{self.account}:stack/*",
                    name="AWSCloudFormation",
                )
            key = self._stack_sessions[role_arn].access_key_id
            token = self._stack_sessions[role_arn].session_token
        return new_client(
            service,
            self.endpoint,
            aws_access_key_id=key,
            aws_secret_access_key="embedded",
            aws_session_token=token,
            region_name=self.region,
        )

    def update_in_place(self, types: Collection[str]) -> None:
        """Update resources of these types where AWS's documents disagree, and replace others."""
        schema.IN_PLACE.clear()
        schema.IN_PLACE.update(types)

    def maintain_fleets(self) -> list[ServiceEvent]:
        """Do what EC2 does by itself as time passes: take back, end and replace instances.

        Return the events of Auto Scaling and of Parameter Store since the last time.
        """
        with self.application.alone_in("ec2"):
            fleet.maintain_fleets(ec2_backends[self.account][self.region])
            events, self.capacity.events = self.capacity.events, []
            return events

    def running_instances(self, stack: str) -> set[str]:
        """Return the ids of a stack's running instances, more cheaply than by a request."""
        with self.application.alone_in("ec2"):
            ec2 = ec2_backends[self.account][self.region]
            ids = {instance.id for instance in ec2.all_running_instances()}
            return {each for each in ids if ec2.tags[each].get("Stack") == stack}

    def power_off(self, instance_id: str) -> None:
        """Register that an instance's machine is off; if it was shutting down, it is terminated."""
        with self.application.alone_in("ec2"):
            self.capacity.powered.discard(instance_id)
            instance = ec2_backends[self.account][self.region].get_instance(instance_id)
            if instance.state == "shutting-down":
                instance.terminate()

    def begin_session(self, instance_id: str) -> AssumedRole:
        """Begin a session of an instance's role, whose credentials EC2 serves in the metadata."""
        ec2 = self.client("ec2")
        filters = [{"Name": "instance-id", "Values": [instance_id]}]
        (found,) = ec2.describe_iam_instance_profile_associations(Filters=filters)[
            "IamInstanceProfileAssociations"
        ]
        arn = f"arn:aws:ec2:{self.region}:{self.account}:instance/{instance_id}"
        return self.access.assume(
            self.access.role_of_profile(found["IamInstanceProfile"]["Arn"]),
            service="ec2",
            source_arn=arn,
            name=instance_id,
            keys={INSTANCE_KEY: arn},
        )


def _listen(port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ValueError(f"the port is {port}; use 1 to 65535, or 0 for a free one")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} is in use by another program; choose another with --port, or "
                "--port 0 for a free one"
            ) from error
        raise
    listener.listen(128)
    return listener

"""Botocore for the embedded AWS: its models are read once, and nobody's settings: import it first.

Otherwise each session of moto and of each client would read megabytes of JSON again, and none would
start under an AWS_PROFILE that names nothing.
"""

from typing import Any

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config

_loader = botocore.loaders.create_loader()
botocore.session.Session._register_data_loader = lambda session: session.lazy_register_component(
    "data_loader", lambda: _loader
)


def new_client(service: str, endpoint: str, **session: Any) -> Any:
    """Return a client whose requests go to the endpoint, whatever profile or proxy the user has."""
    no_profile = botocore.session.Session(session_vars={"profile": (None, None, None, None)})
    config = Config(retries={"max_attempts": 1}, max_pool_connections=32, proxies={})
    return boto3.session.Session(botocore_session=no_profile, **session).client(
        service, endpoint_url=endpoint, config=config
    )

"""A client of the instance metadata service (IMDSv2 only) that fetches and renews its token.

Standard library only: it must work before any package is installed. A path that does not exist
reads as None; any other problem is a MetadataError.
"""

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ENDPOINT = "http://169.254.169.254"
TOKEN_TTL_SECONDS = 21600
TIMEOUT_SECONDS = 2.0


class MetadataError(RuntimeError):
    """The service did not respond as expected, or not at all."""


def endpoint() -> str:
    """Return the service's address: the AWS SDKs' variable, or the default."""
    return os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/") or ENDPOINT


@dataclass(kw_only=True, slots=True)
class InstanceMetadata:
    """The metadata of this instance."""

    endpoint: str = field(default_factory=endpoint)
    clock: Callable[[], float] = time.monotonic
    _token: str = ""
    _token_expires: float = 0.0

    def read(self, path: str) -> str | None:
        """Return the text at /latest/`path`, or None if the service has none."""
        status, text = self._get(path)
        if status == 401:
            # The service dropped the token early, as after a hibernation.
            self._token = ""
            status, text = self._get(path)
        if status == 404:
            return None
        if status != 200:
            raise MetadataError(f"{self.endpoint}/latest/{path} answered {status}")
        return text

    def _get(self, path: str) -> tuple[int, str]:
        headers = {"X-aws-ec2-metadata-token": self._fresh_token()}
        return self._request("GET", path, headers)

    def _fresh_token(self) -> str:
        if not self._token or self.clock() >= self._token_expires:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_SECONDS)}
            asked = self.clock()
            status, text = self._request("PUT", "api/token", headers)
            if status != 200 or not text:
                raise MetadataError(f"{self.endpoint}/latest/api/token answered {status}")
            # Renewed after 80 % of its lifetime, so no request ever carries an expired token.
            self._token, self._token_expires = text, asked + TOKEN_TTL_SECONDS * 0.8
        return self._token

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        request = urllib.request.Request(
            f"{self.endpoint}/latest/{path}", method=method, headers=dict(headers)
        )
        # Metadata is link-local: a proxy from the environment must never see it.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise MetadataError(f"{method} {self.endpoint}/latest/{path}: {error}") from error

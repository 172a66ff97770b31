"""The callers: the root user, role sessions, services, web identities, anonymous ones.

Sessions are moto's, from the same STS that answers AssumeRole.
"""

import base64
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from moto.iam.models import iam_backends
from moto.sts.models import AssumedRole, sts_backends

from embedded_aws.iam.evaluation import Caller, Keys

# A condition key that only instances' requests have.
INSTANCE_KEY = "ec2:sourceinstancearn"
# Lambda adds this one to a function's requests, which distinguishes them from the machines'.
FUNCTION_KEY = "lambda:sourcefunctionarn"
NOBODY = Caller(arn="*", kind="Anonymous")


def variables_of(session: AssumedRole) -> dict[str, str]:
    """Return a session's credentials as the variables that SDKs read."""
    return {
        "AWS_ACCESS_KEY_ID": session.access_key_id,
        "AWS_SECRET_ACCESS_KEY": session.secret_access_key,
        "AWS_SESSION_TOKEN": session.session_token,
    }


class Sessions:
    """The callers of one account, by access key."""

    def __init__(self, *, account: str, region: str) -> None:
        self._account, self._region = account, region
        self._iam: Any = iam_backends[account]["aws"]
        self._sts: Any = sts_backends[account]["aws"]
        # A web page, or another user of this computer, could guess a usual one.
        self.root_key = secrets.token_hex(16)
        root = self._caller("Account", f"arn:aws:iam::{account}:root", account, {})
        self._known: dict[str, Caller] = {self.root_key: root}

    def find(self, environ: Mapping[str, Any], body: bytes) -> Caller:
        """Return the caller that signed a request."""
        given = f"{environ.get('HTTP_AUTHORIZATION', '')}&{environ.get('QUERY_STRING', '')}"
        found = re.search(r"Credential=([^/%]+)", given)
        return self.by_key(found.group(1)) if found else self._unsigned(body)

    def by_key(self, key: str) -> Caller:
        """Return the caller to whom an access key belongs."""
        if key not in self._known:
            session = self._sts.get_assumed_role_from_access_key(key)
            self._known[key] = NOBODY if session is None else self._of(session, {})
        return self._known[key]

    def begin(self, role_arn: str, name: str, keys: Keys) -> AssumedRole:
        """Begin a session of a role, whose requests have these keys."""
        session: AssumedRole = self._sts.assume_role(
            region_name=self._region,
            role_session_name=name,
            role_arn=role_arn,
            policy="",
            duration=6 * 3600,
            external_id="",
        )
        self._known[session.access_key_id] = self._of(session, keys)
        return session

    def service(self, name: str, source_arn: str) -> Caller:
        """Return a service that acts for one of the account's resources."""
        keys = {
            "aws:principaltype": "Service",
            "aws:principalisawsservice": "true",
            "aws:sourcearn": source_arn,
            "aws:sourceaccount": self._account,
        }
        return Caller(arn=f"{name}.amazonaws.com", kind="Service", keys=keys)

    def service_linked(self, name: str) -> Caller:
        """Return a service's own role in the account, by its path and name."""
        arn = f"arn:aws:iam::{self._account}:role/aws-service-role/{name}"
        return self._caller("AssumedRole", arn, "", {}, arn)

    def _of(self, session: AssumedRole, keys: Keys) -> Caller:
        return self._caller("AssumedRole", session.arn, session.user_id, keys, session.role_arn)

    def _caller(self, kind: str, arn: str, user_id: str, more: Keys, role: str = "") -> Caller:
        keys = {
            "aws:principaltype": kind,
            "aws:principalarn": role or arn,
            "aws:principalaccount": self._account,
            "aws:userid": user_id,
            "aws:principalisawsservice": "false",
            "aws:viaawsservice": "false",
            **more,
        }
        return Caller(arn=arn, kind=kind, account=self._account, role=role, keys=keys)

    def _unsigned(self, body: bytes) -> Caller:
        token = parse_qs(body[:20000].decode(errors="replace")).get("WebIdentityToken", [""])[0]
        if token.count(".") != 2:
            return NOBODY
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        issuer = str(claims["iss"]).removeprefix("https://")
        arn = f"arn:aws:iam::{self._account}:oidc-provider/{issuer}"
        return Caller(
            arn=arn if arn in self._iam.open_id_providers else issuer,
            kind="Federated",
            keys={f"{issuer}:{name}".lower(): str(value) for name, value in claims.items()},
        )

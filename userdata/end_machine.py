"""End a machine on which no boot could start: an event of the run, then TerminateInstances.

The user data carries this file, because such a machine may have neither a bundle nor an AWS CLI: it
needs the image's python3 alone, 3.9 or newer, and signs both requests itself. Run, with run.env's
RUN_URI: python3 end_machine.py INSTANCE_ID TIME MESSAGE; the exit status says whether EC2 agreed.
"""

import hashlib
import hmac
import http.client
import json
import os
import sys
import time
import urllib.error
from contextlib import suppress
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

# Metadata is link-local: a proxy from the environment must never see it.
AWS, LINK_LOCAL = build_opener(), build_opener(ProxyHandler({}))


def answer_to(opener: OpenerDirector, request: Request) -> str:
    """Send a request; OSError if it is refused."""
    with opener.open(request, timeout=10) as answer:
        return str(answer.read().decode(errors="replace"))


def metadata(path: str) -> str:
    """Return an entry below meta-data/ of the instance metadata service."""
    place = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    asked = Request(f"{place}/latest/api/token", method="PUT", headers=seconds)
    token = {"X-aws-ec2-metadata-token": answer_to(LINK_LOCAL, asked)}
    return answer_to(LINK_LOCAL, Request(f"{place}/latest/meta-data/{path}", headers=token))


def signed(service: str, method: str, path: str, body: bytes) -> Request:
    """Return a request with Signature Version 4, by the instance's role.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
    """
    role, region = metadata("iam/security-credentials/"), metadata("placement/region")
    key = json.loads(metadata(f"iam/security-credentials/{role}"))
    place = os.environ.get("AWS_ENDPOINT_URL")
    place = place or f"https://{service}.{region}.{metadata('services/domain')}"
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    headers = {  # in alphabetical order
        "content-type": f"application/{'json' if service == 's3' else 'x-www-form-urlencoded'}",
        "host": urlsplit(place).netloc,
        "x-amz-content-sha256": hashlib.sha256(body).hexdigest(),
        "x-amz-date": stamp,
        "x-amz-security-token": key["Token"],
    }
    named, lines = ";".join(headers), [f"{name}:{text}" for name, text in headers.items()]
    canonical = "\n".join([method, path, "", *lines, "", named, headers["x-amz-content-sha256"]])
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signature = f"AWS4{key['SecretAccessKey']}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"):
        signature = hmac.new(signature, part.encode(), "sha256").digest()
    credential = f"Credential={key['AccessKeyId']}/{scope}, SignedHeaders={named}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, Signature={signature.hex()}"
    return Request(place + path, data=body, method=method, headers=headers)


def is_done(service: str, method: str, path: str, body: str) -> bool:
    """Send a signed request; print why it failed."""
    try:
        answer_to(AWS, signed(service, method, path, body.encode()))
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
        with suppress(OSError):  # the log may be on a full disk
            os.write(1, f"[failed] {service}: {error} {said}\n".encode())
        return False
    return True


def main() -> int:
    """Report, then ask EC2, whether or not S3 has the report."""
    instance_id, when, message = sys.argv[1:]
    named = {"name": "machine-failed", "status": "failed", "message": message}
    event = json.dumps({"time": when, "instance_id": instance_id, **named})
    run = os.environ.get("RUN_URI", "").rpartition("//")[2]
    stamp = when.replace("-", "").replace(":", "")
    is_done("s3", "PUT", quote(f"/{run}/events/{stamp}-{instance_id}-machine-failed.json"), event)
    asked = {"Action": "TerminateInstances", "InstanceId.1": instance_id, "Version": "2016-11-15"}
    return 0 if is_done("ec2", "POST", "/", urlencode(asked)) else 1


if __name__ == "__main__":
    sys.exit(main())

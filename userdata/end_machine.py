"""End a machine on which no boot could start: an event of the run, then TerminateInstances.

The user data carries this file, because such a machine may have neither a bundle nor an AWS CLI: it
needs the image's python3 alone, 3.9 or newer, and signs its two requests itself (Signature Version
4). Run, with run.env's RUN_URI: python3 end_machine.py INSTANCE_ID MESSAGE
"""

import hashlib
import hmac
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from urllib.parse import quote, urlencode, urlsplit

TIMEOUT_SECONDS = 10
RETRY_SECONDS = 60.0
# Metadata is link-local: a proxy from the environment must never see it.
LINK_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def say(text: str) -> None:
    """Write a line; the log may be on a full disk."""
    with suppress(OSError):
        os.write(1, f"{text}\n".encode())


def metadata(path: str) -> str:
    """Return an entry below meta-data/ of the instance metadata service."""
    place = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"

    def read(what: str, method: str, **headers: str) -> str:
        named = {f"X-aws-ec2-metadata-{name}": text for name, text in headers.items()}
        request = urllib.request.Request(f"{place}/latest/{what}", method=method, headers=named)
        with LINK_LOCAL.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return str(answer.read().decode())

    token = read("api/token", "PUT", **{"token-ttl-seconds": "60"})
    return read(f"meta-data/{path}", "GET", token=token)


def call(service: str, method: str, path: str, body: bytes) -> None:
    """Send one signed request; OSError if it is refused.

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
    lines = [method, path, "", *(f"{name}:{text}" for name, text in headers.items()), ""]
    signed = ";".join(headers)
    request = "\n".join([*lines, signed, headers["x-amz-content-sha256"]])
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    signature = f"AWS4{key['SecretAccessKey']}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"):
        signature = hmac.new(signature, part.encode(), "sha256").digest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key['AccessKeyId']}/{scope}, SignedHeaders={signed}, "
        f"Signature={signature.hex()}"
    )
    sent = urllib.request.Request(place + path, data=body, method=method, headers=headers)
    urllib.request.urlopen(sent, timeout=TIMEOUT_SECONDS).close()


def main() -> int:
    """Ask EC2 until it agrees, and until then S3, which may not have the event yet."""
    instance_id, message = sys.argv[1:]
    now = time.gmtime()
    event = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        "instance_id": instance_id,
        "name": "machine-failed",
        "status": "failed",
        "message": message,
    }
    run = os.environ.get("RUN_URI", "").rpartition("//")[2]
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', now)}-{instance_id}-machine-failed.json"
    asked = {"Action": "TerminateInstances", "InstanceId.1": instance_id, "Version": "2016-11-15"}
    requests = {
        "s3": ("PUT", quote(f"/{run}/events/{name}"), json.dumps(event).encode()),
        "ec2": ("POST", "/", urlencode(asked).encode()),
    }
    while "ec2" in requests:
        for service, request in list(requests.items()):
            try:
                call(service, *request)
                del requests[service]
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                answer = ""
                if isinstance(error, urllib.error.HTTPError):
                    answer = error.read().decode(errors="replace")
                say(f"[failed] machine {instance_id}: {service}: {error} {answer}")
        if "ec2" in requests:
            time.sleep(float(os.environ.get("TERMINATE_RETRY_SECONDS", RETRY_SECONDS)))
    say(f"[ok] machine {instance_id}: EC2 terminates it")
    return 0


if __name__ == "__main__":
    sys.exit(main())

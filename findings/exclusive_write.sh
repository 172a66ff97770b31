#!/usr/bin/env bash
# s3fs 2026.9.0: open(..., "xb") of a key that is there uploads everything before it raises
# FileExistsError, because S3 compares when an upload completes; the upload of more than one part is
# neither completed nor aborted: its parts stay in the bucket and are billed until a lifecycle rule
# or somebody ends it. A small file leaves nothing. The old object stays. Against moto 5.2.5's
# server.
# Seen: 1 kB: refused, no open upload; 20 MB in parts of 5 MiB: refused, one open upload of 20 MB.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  s3fs==2026.9.0 boto3==1.43.117 'moto[server,s3]==5.2.5'
export AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import sys

import boto3
import s3fs
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
client = boto3.client("s3", endpoint_url=url)
client.create_bucket(Bucket="bucket")
fsspec = s3fs.S3FileSystem(endpoint_url=url)
left = {}
for size in (1000, 20_000_000):
    key = f"key-{size}"
    client.put_object(Bucket="bucket", Key=key, Body=b"old")
    try:
        with fsspec.open(f"bucket/{key}", "xb", block_size=5 * 2**20) as file:
            file.write(b"n" * size)
        what = "written"
    except FileExistsError:
        what = "FileExistsError"
    left[size] = 0
    for upload in client.list_multipart_uploads(Bucket="bucket").get("Uploads", []):
        parts = client.list_parts(Bucket="bucket", Key=key, UploadId=upload["UploadId"])["Parts"]
        left[size] += sum(part["Size"] for part in parts)
    content = client.get_object(Bucket="bucket", Key=key)["Body"].read()
    print(f"{size} bytes: {what}, the object is {content!r}, {left[size]} bytes in open uploads")
    if what == "written" or content != b"old":
        sys.exit(1)
server.stop()
sys.exit(left != {1000: 0, 20_000_000: 20_000_000})
PY

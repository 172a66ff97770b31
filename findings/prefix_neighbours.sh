#!/usr/bin/env bash
# opendal 0.47.12's remove_all("runs/1") and s3path 0.6.5's S3Path("/bucket/runs/1").rmdir() also
# delete runs/10 and runs/1.json: on S3 both take the path for the first letters of keys. So does
# opendal's delete(recursive=True), and s3path's rename() moves the neighbours too, to names made up
# of the new path and the rest. With opendal a slash at the end helps; S3Path has none. s3fs
# 2026.9.0 leaves the neighbours alone, and so does opendal in a folder. Against moto 5.2.5.
# Seen: after opendal and s3path nothing is left of runs/1.json, runs/1/a and runs/10/b.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet opendal==0.47.12 \
  s3path==0.6.5 s3fs==2026.9.0 boto3==1.43.117 'moto[server,s3]==5.2.5'
export AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
"$folder/venv/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys

import boto3
import opendal
import s3fs
from moto.server import ThreadedMotoServer
from s3path import PureS3Path, S3Path, register_configuration_parameter

KEYS = ["runs/1.json", "runs/1/a", "runs/10/b"]
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
client = boto3.client("s3", endpoint_url=url)
client.create_bucket(Bucket="bucket")
s3 = opendal.Operator("s3", bucket="bucket", endpoint=url, region="us-east-1")
register_configuration_parameter(PureS3Path("/"), resource=boto3.resource("s3", endpoint_url=url))
run = S3Path("/bucket/runs/1")
fsspec = s3fs.S3FileSystem(endpoint_url=url)


def keys():
    return [each["Key"] for each in client.list_objects_v2(Bucket="bucket").get("Contents", [])]


def left(call):
    for key in keys():
        client.delete_object(Bucket="bucket", Key=key)
    for key in KEYS:
        client.put_object(Bucket="bucket", Key=key, Body=b"x")
    call()
    return keys()


def left_elsewhere(operator):
    for key in KEYS:
        operator.write(key, b"x")
    operator.remove_all("runs/1")
    return [key for key in KEYS if operator.exists(key)]


NEIGHBOURS = ["runs/1.json", "runs/10/b"]
EXPECTED = {
    'opendal remove_all("runs/1")': (left(lambda: s3.remove_all("runs/1")), []),
    'opendal remove_all("runs/1/")': (left(lambda: s3.remove_all("runs/1/")), NEIGHBOURS),
    'opendal delete("runs/1", recursive=True)': (
        left(lambda: s3.delete("runs/1", recursive=True)),
        [],
    ),
    "s3path rmdir()": (left(run.rmdir), []),
    's3path rename("/bucket/old")': (
        left(lambda: run.rename(S3Path("/bucket/old"))),
        ["old.json", "old/a", "old0/b"],
    ),
    "s3fs rm(recursive=True)": (left(lambda: fsspec.rm("bucket/runs/1", True)), NEIGHBOURS),
    "opendal in a folder": (
        left_elsewhere(opendal.Operator("fs", root=sys.argv[1] + "/files")),
        NEIGHBOURS,
    ),
}
server.stop()
for what, (seen, _) in EXPECTED.items():
    print(f"{what}: left {seen}")
sys.exit(any(seen != expected for seen, expected in EXPECTED.values()))
PY

#!/usr/bin/env bash
# moto 5.2.5: ListObjectVersions copies the content of every object of the bucket, whatever the
# prefix, and keeps each copy until the server is reset: a test suite that lists versions often
# fills the memory, as ours did (20 GB). ListObjectsV2 copies nothing.
# Seen: 20 objects, 80 MB: ten lists of objects add 0 MB, ten lists of the versions of a key that
# does not exist add 785 MB, and deleting all objects gives 64 MB back.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  boto3==1.43.117 psutil==7.2.2 'moto[server,s3]==5.2.5'
export AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import os
import sys

import boto3
import psutil
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
client = boto3.client("s3", endpoint_url="http://{}:{}".format(*server.get_host_and_port()))
client.create_bucket(Bucket="bucket")
for number in range(20):
    client.put_object(Bucket="bucket", Key=f"key-{number}", Body=os.urandom(4_000_000))


def megabytes(what, call, times):
    before = psutil.Process().memory_info().rss
    for number in range(times):
        call(number)
    grown = (psutil.Process().memory_info().rss - before) / 1e6
    print(f"{what}: {grown:+.0f} MB")
    return grown


objects = megabytes(
    "ten lists of objects", lambda _: client.list_objects_v2(Bucket="bucket", Prefix="no"), 10
)
versions = megabytes(
    "ten lists of versions", lambda _: client.list_object_versions(Bucket="bucket", Prefix="no"), 10
)
given_back = megabytes(
    "all objects deleted", lambda n: client.delete_object(Bucket="bucket", Key=f"key-{n}"), 20
)
server.stop()
sys.exit(not (objects < 100 and versions > 700 and versions + given_back > 600))
PY

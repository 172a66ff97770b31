#!/usr/bin/env bash
# universal-pathlib 0.3.10, s3fs 2026.9.0: UPath("s3://...").rename() of a folder moves nothing,
# says nothing and returns the new path; a local folder it moves. rename(recursive=True), which is
# deprecated, and s3fs' mv(recursive=True) copy all, then raise FileNotFoundError for the folder
# itself, which is no object: both folders stay. UPath's move() works. Against moto 5.2.5's server.
# Seen: rename() leaves tmp/a and tmp/sub/b where they were; with recursive=True four objects.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  universal-pathlib==0.3.10 s3fs==2026.9.0 boto3==1.43.117 'moto[server,s3]==5.2.5'
export AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys
from pathlib import Path

import boto3
import s3fs
from moto.server import ThreadedMotoServer
from upath import UPath

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
client = boto3.client("s3", endpoint_url=url)
client.create_bucket(Bucket="bucket")
fsspec = s3fs.S3FileSystem(endpoint_url=url)


def on_s3(name):
    return UPath(f"s3://bucket/{name}", endpoint_url=url)


def keys():
    return [each["Key"] for each in client.list_objects_v2(Bucket="bucket").get("Contents", [])]


def after(call):
    for key in keys():
        client.delete_object(Bucket="bucket", Key=key)
    for key in ("tmp/a", "tmp/sub/b"):
        client.put_object(Bucket="bucket", Key=key, Body=b"x")
    fsspec.invalidate_cache()
    try:
        what = f"returns {call()}"
    except FileNotFoundError as error:
        what = f"FileNotFoundError: {error}"
    return what, keys()


Path("tmp/sub").mkdir(parents=True)
Path("tmp/a").touch()
returned = UPath("tmp").absolute().rename(UPath("final").absolute())
local = f"returns .../{returned.name}", sorted(map(str, Path("final").glob("*")))

OLD, NEW, NEITHER = ["tmp/a", "tmp/sub/b"], ["final/a", "final/sub/b"], "FileNotFoundError: "
CASES = {
    "rename() of a local folder": (local, "returns .../final", ["final/a", "final/sub"]),
    "rename()": (
        after(lambda: on_s3("tmp").rename(on_s3("final"))), "returns s3://bucket/final", OLD,
    ),
    "rename(recursive=True)": (
        after(lambda: on_s3("tmp").rename(on_s3("final"), recursive=True)), NEITHER, NEW + OLD,
    ),
    "s3fs mv(recursive=True)": (
        after(lambda: fsspec.mv("bucket/tmp", "bucket/final", recursive=True)), NEITHER, NEW + OLD,
    ),
    "move()": (after(lambda: on_s3("tmp").move(on_s3("final"))), "returns s3://bucket/final", NEW),
}
server.stop()
ok = True
for name, ((what, seen), begins, expected) in CASES.items():
    print(f"{name}: {what}; there is {seen}")
    ok &= what.startswith(begins) and seen == expected
sys.exit(not ok)
PY

#!/usr/bin/env bash
# An S3 object that is replaced while it is read: pyarrow 26.0.1 and obstore 0.12.1 ask for ranges
# without saying of which version, and return the beginning of the old object and the rest of the
# new one, without an error. s3fs 2026.9.0 raises FileExpired, smart_open 9.0.2 reads the old one to
# its end. 20 MB against moto 5.2.5's server, after a first read of 1 kB.
# Seen: pyarrow and obstore a mixture; s3fs FileExpired; smart_open the old bytes.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet s3fs==2026.9.0 \
  'smart_open[s3]==9.0.2' pyarrow==26.0.1 obstore==0.12.1 'moto[server,s3]==5.2.5'
export AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import sys

import boto3
import obstore
import pyarrow.fs
import s3fs
import smart_open
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

SIZE = 20_000_000
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
client = boto3.client("s3", endpoint_url=url)
client.create_bucket(Bucket="bucket")
arrow = pyarrow.fs.S3FileSystem(
    endpoint_override=url, region="us-east-1", access_key="x", secret_key="x"
)
fsspec = s3fs.S3FileSystem(endpoint_url=url)
store = S3Store("bucket", endpoint=url, client_options={"allow_http": True})
readers = {
    "pyarrow": lambda key: arrow.open_input_file(f"bucket/{key}"),
    "obstore": lambda key: obstore.open_reader(store, key),
    "s3fs": lambda key: fsspec.open(f"bucket/{key}", "rb", block_size=5 * 2**20),
    "smart_open": lambda key: smart_open.open(
        f"s3://bucket/{key}", "rb", transport_params={"client": client}
    ),
}


def read(name):
    client.put_object(Bucket="bucket", Key=name, Body=b"a" * SIZE)
    file = readers[name](name)
    first = bytes(file.read(1000))
    boto3.client("s3", endpoint_url=url).put_object(Bucket="bucket", Key=name, Body=b"b" * SIZE)
    try:
        content = first + bytes(file.read())
    except OSError as error:
        return type(error).__name__
    old, new = content.count(b"a"), content.count(b"b")
    print(f"{name}: {old} old bytes, {new} new ones")
    return "mixture" if old and new else "old" if old == SIZE else "other"


seen = {name: read(name) for name in readers}
print(seen)
server.stop()
expected = {"pyarrow": "mixture", "obstore": "mixture", "s3fs": "FileExpired", "smart_open": "old"}
sys.exit(seen != expected)
PY

#!/usr/bin/env bash
# An exception inside `with open(...)` on an S3 object: s3fs 2026.9.0, pyarrow 26.0.1 and
# cloudpathlib 0.26.0 finish the upload and publish what was written so far under the final name
# (a Parquet file even gets a valid footer: half a table that reads without an error); smart_open
# 9.0.2 and obstore 0.12.1 publish nothing. Against moto 5.2.5's server, 1 kB and 20 MB alike.
# Seen: s3fs, pyarrow, cloudpathlib: an object; smart_open, obstore: none, no open upload.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet s3fs==2026.9.0 \
  'smart_open[s3]==9.0.2' pyarrow==26.0.1 obstore==0.12.1 'cloudpathlib[s3]==0.26.0' \
  'moto[server,s3]==5.2.5'
export AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import sys

import boto3
import obstore
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import s3fs
import smart_open
from cloudpathlib import S3Client
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
client = boto3.client("s3", endpoint_url=url)
client.create_bucket(Bucket="bucket")
arrow = pyarrow.fs.S3FileSystem(
    endpoint_override=url, region="us-east-1", access_key="x", secret_key="x"
)
fsspec = s3fs.S3FileSystem(endpoint_url=url)
paths = S3Client(endpoint_url=url)
store = S3Store("bucket", endpoint=url, client_options={"allow_http": True})
writers = {
    "s3fs": lambda key: fsspec.open(f"bucket/{key}", "wb"),
    "pyarrow": lambda key: arrow.open_output_stream(f"bucket/{key}"),
    "cloudpathlib": lambda key: paths.CloudPath(f"s3://bucket/{key}").open("wb"),
    "smart_open": lambda key: smart_open.open(
        f"s3://bucket/{key}", "wb", transport_params={"client": client}
    ),
    "obstore": lambda key: obstore.open_writer(store, key),
}


def stored():
    found = client.list_objects_v2(Bucket="bucket")
    return {each["Key"]: each["Size"] for each in found.get("Contents", [])}


for name, writer in writers.items():
    for size in (1000, 20_000_000):
        try:
            with writer(f"{name}-{size}") as file:
                file.write(b"a" * size)
                raise InterruptedError
        except InterruptedError:
            print(f"{name}: of {size} bytes, {stored().get(f'{name}-{size}', 'nothing')} published")
half = pa.table({"x": list(range(1000))})
try:
    with pq.ParquetWriter("bucket/table", half.schema, filesystem=fsspec) as writer:
        writer.write_table(half)
        raise InterruptedError
except InterruptedError:
    rows = pq.read_table("bucket/table", filesystem=arrow).num_rows
print(f"Parquet through s3fs: the first {rows} rows of what was to be 2000 read without an error")
names = {key.partition("-")[0] for key in stored()}
server.stop()
sys.exit(names != {"s3fs", "pyarrow", "cloudpathlib", "table"} or rows != 1000)
PY

#!/usr/bin/env bash
# flax 0.12.8, ormsgpack 1.13.1, mosaicml-streaming 0.13.0 (column "ndarray"): each writes an array
# of big-endian numbers, as readers of FITS, netCDF and big-endian TIFF files return them, with its
# type's name but without its byte order, and reads other values back. safetensors.numpy and
# msgpack-numpy keep the values; orjson and MDS with a named type refuse the array.
# Seen: 0, 1, 2 are read as 0, 16777216, 33554432 from the first three.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    flax==0.12.8 ormsgpack==1.13.1 mosaicml-streaming==0.13.0 torch==2.14.1 numpy==2.1.3 \
    safetensors==0.8.0 msgpack-numpy==0.4.8 orjson==3.13.0
cd "$folder"
venv/bin/python - <<'PY'
import sys

import msgpack
import msgpack_numpy
import numpy as np
import orjson
import ormsgpack
import safetensors.numpy
from flax import serialization
from streaming import MDSWriter, StreamingDataset


def by_mds(array, column):
    out = column.replace(":", "-")
    with MDSWriter(out=out, columns={"a": column}) as writer:
        writer.write({"a": array})
    return StreamingDataset(local=out, batch_size=1)[0]["a"]


def by_flax(array):
    return serialization.msgpack_restore(serialization.msgpack_serialize({"a": array}))["a"]


def by_ormsgpack(array):
    return ormsgpack.unpackb(ormsgpack.packb(array, option=ormsgpack.OPT_SERIALIZE_NUMPY))


def by_orjson(array):
    return orjson.loads(orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY))


def by_msgpack_numpy(array):
    packed = msgpack.packb(array, default=msgpack_numpy.encode)
    return msgpack.unpackb(packed, object_hook=msgpack_numpy.decode)


def by_safetensors(array):
    return safetensors.numpy.load(safetensors.numpy.save({"a": array}))["a"]


def after(write_and_read):
    try:
        return np.asarray(write_and_read(np.arange(3, dtype=">i4"))).tolist()
    except (TypeError, ValueError) as error:
        return f"refused: {error}"


read = {
    "flax": after(by_flax),
    "ormsgpack": after(by_ormsgpack),
    "MDS, ndarray": after(lambda array: by_mds(array, "ndarray")),
    "MDS, ndarray:int32": after(lambda array: by_mds(array, "ndarray:int32")),
    "orjson": after(by_orjson),
    "msgpack-numpy": after(by_msgpack_numpy),
    "safetensors.numpy": after(by_safetensors),
}
for name, values in read.items():
    print(f"{name}: {values}")
swapped, kept = [0, 1 << 24, 2 << 24], [0, 1, 2]
seen = list(read.values())
as_stated = seen[:3] == [swapped] * 3 and seen[5:] == [kept] * 2
sys.exit(not (as_stated and all(isinstance(each, str) for each in seen[3:5])))
PY

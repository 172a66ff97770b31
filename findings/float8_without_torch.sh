#!/usr/bin/env bash
# safetensors.numpy 0.8.0 writes float8 arrays of ml_dtypes 0.6.0, but its load_file looks the type
# up in numpy, where it does not exist: AttributeError. bfloat16 makes the round trip. The file is
# right: safe_open lists it, and a reader of the raw bytes gets the values back.
# Seen: bfloat16 equal; float8_e4m3fn and float8_e5m2 saved, then "module 'numpy' has no attribute".
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  safetensors==0.8.0 ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import json
import struct
import sys

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file


def round_trip(name):
    values = np.array([0.5, 1, 2, -4], getattr(ml_dtypes, name))
    save_file({"x": values}, "x.safetensors")
    raw = open("x.safetensors", "rb").read()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    assert raw[start:] == values.tobytes(), json.loads(raw[8:start])
    try:
        loaded = load_file("x.safetensors")["x"]
    except AttributeError as error:
        return f"saved, not read: {error}"
    return "equal" if np.array_equal(loaded, values) else "other values"


seen = {name: round_trip(name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
for name, verdict in seen.items():
    print(f"{name}: {verdict}")
sys.exit(
    not (
        seen["bfloat16"] == "equal"
        and all("not read" in seen[name] for name in ("float8_e4m3fn", "float8_e5m2"))
    )
)
PY

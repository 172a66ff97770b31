#!/usr/bin/env bash
# fastparquet 2026.9.0 writes a column of lists of ints (token ids) as text, JSON in bytes: it reads
# its own file back as lists, pyarrow 26.0.1 reads strings. Of a file that pyarrow wrote it reads
# lists right, but 16-bit floats as two bytes each. Neither says a word.
# Seen: '[1,2]' for [1, 2]; b'\x00<' for float16 1.0; lists and 64-bit ints of pyarrow right.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  fastparquet==2026.9.0 pyarrow==26.0.1 pandas==3.1.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import sys

import fastparquet
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

tokens = [[1, 2], [3], []]
fastparquet.write("fastparquet.parquet", pd.DataFrame({"tokens": tokens}))
own = fastparquet.ParquetFile("fastparquet.parquet").to_pandas()["tokens"].tolist()
other = pq.read_table("fastparquet.parquet").to_pydict()["tokens"]
print(f"fastparquet wrote {tokens}: it reads {own}, pyarrow {other}")
halves = np.ones(3, np.float16)
pq.write_table(pa.table({"tokens": tokens, "half": halves}), "pyarrow.parquet")
frame = fastparquet.ParquetFile("pyarrow.parquet").to_pandas()
lists, ones = [[*map(int, each)] for each in frame["tokens"]], frame["half"].tolist()
print(f"pyarrow wrote {tokens} and {halves.tolist()}: fastparquet reads {lists} and {ones}")
sys.exit([own, lists, other, ones] != [tokens, tokens, ["[1,2]", "[3]", "[]"], [b"\x00<"] * 3])
PY

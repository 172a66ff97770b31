#!/usr/bin/env bash
# gguf 0.19.0: GGUFWriter leaves out an empty string and an empty array without a word, so a reader
# sees no key (no system prompt given, instead of an empty one; no extra tokens known, instead of
# none). False, 0 and a list of one empty string are written.
# Seen: of "", [], False, 0 and [""] the file has False, 0 and [""].
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet gguf==0.19.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import sys

from gguf import GGUFReader, GGUFWriter

writer = GGUFWriter("empty.gguf", "llama")
writer.add_string("empty string", "")
writer.add_array("empty array", [])
writer.add_bool("false", False)
writer.add_uint32("zero", 0)
writer.add_array("array of an empty string", [""])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
asked = ["empty string", "empty array", "false", "zero", "array of an empty string"]
found = [name for name in asked if name in GGUFReader("empty.gguf").fields]
print("written:", asked, "read:", found, sep="\n  ")
sys.exit(found != asked[2:])
PY

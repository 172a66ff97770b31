#!/usr/bin/env bash
# A script that takes 8 s to save at SIGTERM (a Spot notice, systemctl stop, docker stop), behind a
# task runner that gets the signal alone. poethepoet 0.49.0 never passes it on: poe sends SIGINT
# and, in the same moment, SIGKILL to the task's process group, so the script is killed unsaved,
# perhaps in the middle of a write. (Ctrl-C leaves it 1.6 s: SIGINT every 0.8 s, SIGKILL with the
# third.) `use_exec = true` helps: the script takes poe's place. honcho 2.0.0 passes it on, but
# kills what still runs 5 s after the first of its processes has ended, as TensorBoard beside the
# script does at once; a Procfile of one line helps. taskipy 1.14.1 and pdm 2.29.4 pass it on and
# wait.
# Seen: as in the table below, with the runner's exit code (the script's own is 7).
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    poethepoet==0.49.0 honcho==2.0.0 taskipy==1.14.1 pdm==2.29.4
cd "$folder"
export PATH=$folder/venv/bin:$PATH
cat >train.py <<'PY'
import pathlib
import signal
import sys
import time


def save(number, frame):
    time.sleep(8)
    pathlib.Path("saved").touch()
    sys.exit(7)


signal.signal(signal.SIGTERM, save)
pathlib.Path("started").touch()
time.sleep(60)
PY
printf 'train: python train.py\n' >One
printf 'train: python train.py\nboard: exec sleep 60\n' >Two
cat >pyproject.toml <<'TOML'
[project]
name = "training"
version = "1"
requires-python = ">=3.11"
[tool.poe.tasks]
train = "python train.py"
exec = {cmd = "python train.py", use_exec = true}
[tool.taskipy.tasks]
train = "python train.py"
[tool.pdm.scripts]
train = "python train.py"
TOML
for runner in "poe train" "poe exec" "honcho -f Two start" "honcho -f One start" \
    "task train" "pdm run train"; do
    rm -f started saved
    # shellcheck disable=SC2086
    $runner >log 2>&1 &
    while [ ! -e started ]; do sleep 0.1; done
    sleep 1
    SECONDS=0 code=0
    kill -TERM "$!"
    wait "$!" || code=$?
    after=$SECONDS
    while ((SECONDS < 10)); do sleep 0.5; done # one that was only left behind would save now
    pace=$((after < 4 ? 0 : after < 8 ? 5 : 8))
    echo "$runner: ended after about $pace s with $code,$([ -e saved ] || echo " not") saved"
done | tee seen
diff seen - <<'SEEN'
poe train: ended after about 0 s with 130, not saved
poe exec: ended after about 8 s with 7, saved
honcho -f Two start: ended after about 5 s with 143, not saved
honcho -f One start: ended after about 8 s with 143, saved
task train: ended after about 8 s with 7, saved
pdm run train: ended after about 8 s with 7, saved
SEEN

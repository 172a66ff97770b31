#!/usr/bin/env bash
# What the next start does after SIGKILL (a machine that is lost) in the third of three tasks, with
# the folder as it was left. go-task-bin 3.54.0 skips the third and ends with 0, if its `generates`
# is there, which a saved checkpoint is: the checksum of the sources is noted before the commands,
# and removed if they fail. `method: timestamp` does the same, `method: none` or `--force` helps.
# jug 2.7.0 skips it and ends with 0, at every start, as the dead process holds its lock (`jug
# cleanup --locks-only`; if another task needs the result, it waits 30 minutes first). doit 0.37.0
# repeats all: it writes its database when it ends, so it forgets the finished tasks, after SIGTERM
# as well; SIGINT helps.
# Seen, the tasks that ran in both starts, and what the third left: 1 2 3 half, 1 2 3 1 2 3 whole.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    go-task-bin==3.54.0 jug==2.7.0 doit==0.37.0
cd "$folder"
export PATH=$folder/venv/bin:$PATH
cat >step.py <<'PY'
import pathlib
import sys
import time


def run(number, _=None):
    with open("ran", "a") as log:
        log.write(f"{number} ")
    output = pathlib.Path(f"out-{number}")
    is_first = number == 3 and not output.exists()
    output.write_text("half")
    time.sleep(60 * is_first)
    output.write_text("whole")


if __name__ == "__main__":
    run(int(sys.argv[1]))
PY
cat >Taskfile.yml <<'YML'
version: "3"
tasks:
  default: [task: step-1, task: step-2, task: step-3]
  step-*:
    vars: {N: "{{index .MATCH 0}}"}
    sources: [step.py]
    generates: ["out-{{.N}}"]
    cmds: ["python step.py {{.N}}"]
YML
cat >jugfile.py <<'PY'
import step
from jug import Task

Task(step.run, 3, Task(step.run, 2, Task(step.run, 1)))
PY
cat >dodo.py <<'PY'
def task_steps():
    for number in "123":
        yield {
            "name": number,
            "file_dep": ["step.py"],
            "targets": [f"out-{number}"],
            "actions": [f"python step.py {number}"],
        }
PY
for runner in task "jug execute" doit; do
    rm -f ran out-*
    # shellcheck disable=SC2086
    setsid $runner >log 2>&1 &
    while ! grep -q half out-3 2>/dev/null; do sleep 0.1; done
    kill -KILL -- "-$!"
    wait "$!" 2>/dev/null || true
    code=0
    # shellcheck disable=SC2086
    $runner >log 2>&1 || code=$?
    echo "$runner: exit code $code, ran $(cat ran)$(cat out-3)"
done 2>/dev/null | tee seen
diff seen - <<'SEEN'
task: exit code 0, ran 1 2 3 half
jug execute: exit code 0, ran 1 2 3 half
doit: exit code 0, ran 1 2 3 1 2 3 whole
SEEN

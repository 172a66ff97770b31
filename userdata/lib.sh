# shellcheck shell=bash
# Functions and variables of all boot scripts, which source it from the bundle's folder. Absolute
# paths start with MACHINE_ROOT: empty on EC2, the machine's own folder in a rehearsal.
set -o errexit -o nounset -o pipefail -o errtrace
trap 'echo >&2 "$0 line $LINENO: \"$BASH_COMMAND\" failed with status $?"' ERR

root=${MACHINE_ROOT:-}
# shellcheck disable=SC2034  # for the scripts that source this one
run=$root/run/training
# After a restart of the machine /run is empty.
mkdir -p "$run"
packages=$root/opt/training/packages

# run.env is the contract; machine.env holds what boot found out about this machine.
set -o allexport
# shellcheck source=/dev/null
source "$root/etc/training/run.env"
if [[ -e $root/opt/training/machine.env ]]; then
    # shellcheck source=/dev/null
    source "$root/opt/training/machine.env"
fi
INSTANCE_ID=${INSTANCE_ID:-$(cat "$root/var/lib/cloud/data/instance-id")}
set +o allexport
# AWS CLI v1 reads the region only here, and by default asks the metadata once, for one second.
export AWS_DEFAULT_REGION=$AWS_REGION
export AWS_METADATA_SERVICE_TIMEOUT=5 AWS_METADATA_SERVICE_NUM_ATTEMPTS=5

# fail TEXT...: ends a step, saying why and what to do.
fail() {
    echo >&2 "$*"
    exit 1
}

# refuse TEXT...: like fail, for what would fail on any machine, so it ends the run.
refuse() {
    echo >&2 "$*"
    exit 78
}

# carry_on: from here on, the script continues to its end whatever fails, as on a full disk.
carry_on() {
    set +o errexit
    trap - ERR
}

# aws_cli ARGUMENT...: gives S3 a minute; exported, this would change the user's own clients.
aws_cli() {
    AWS_RETRY_MODE=standard AWS_MAX_ATTEMPTS=14 PATH=$PATH:$root/opt/pytorch/bin aws "$@"
}

# fetch_object URI FILE: leaves no file if there is no object; any other problem is an error.
fetch_object() {
    rm -f "$2"
    if ! aws_cli s3 cp --only-show-errors "$1" "$2" 2>"$2.error"; then
        grep -q '(404)' "$2.error" || fail "$1 could not be read: $(tail -n 1 "$2.error")"
    fi
}

# json_field FILE NAME: prints a top-level field; nothing if the file or the field is missing.
json_field() {
    [[ ! -e $1 ]] || python3 -c '
import json, pathlib, sys
print(json.loads(pathlib.Path(sys.argv[1]).read_text()).get(sys.argv[2]) or "")' "$1" "$2"
}

# run_state: fetches the run's head.json and prints its state; nothing if it does not exist.
run_state() {
    fetch_object "$RUN_URI/head.json" "$run/head.json" && json_field "$run/head.json" state
}

# kept_bundle: prints where the run keeps run.env's bundle, whose name is a hash of its content.
kept_bundle() {
    echo "$RUN_URI/bundles/${BUNDLE_URI##*/}"
}

# training_program ARGUMENT...: runs the bundle's training/ with the interpreter that boot found.
# Only it sees the packages that boot installed: the AWS CLI must not get another botocore.
training_program() {
    PYTHONPATH=$PWD:$packages "${PYTHON:-python3}" -m training "$@"
}

# shellcheck shell=bash
# What all boot scripts share; sourced with the bundle as working folder. MACHINE_ROOT is empty on
# EC2; a process machine sets it, and every absolute path of the machine stands below it.
set -o errexit -o nounset -o pipefail -o errtrace
trap 'echo >&2 "$0 line $LINENO: \"$BASH_COMMAND\" ended with status $?"' ERR

root=${MACHINE_ROOT:-}
# shellcheck disable=SC2034  # for the scripts that source this one
run=$root/run/training
packages=$root/opt/training/packages

# run.env is the contract; machine.env is what boot has found out about this machine.
set -o allexport
# shellcheck source=/dev/null
source "$root/etc/training/run.env"
if [[ -e $root/opt/training/machine.env ]]; then
    # shellcheck source=/dev/null
    source "$root/opt/training/machine.env"
fi
set +o allexport
# The AWS CLI v1 of the AMI reads the region under this name only.
export AWS_DEFAULT_REGION=$AWS_REGION

# fail TEXT: ends a step with why and what to do.
fail() {
    echo >&2 "$*"
    exit 1
}

aws_cli() {
    "$(command -v aws || echo "$root/opt/pytorch/bin/aws")" "$@"
}

# fetch_object URI FILE: no file is left where no object is; any other trouble is an error.
fetch_object() {
    rm -f "$2"
    if ! aws_cli s3 cp --only-show-errors "$1" "$2" 2>"$2.error"; then
        grep -q '(404)' "$2.error" || fail "$1 could not be read: $(tail -n 1 "$2.error")"
    fi
}

# json_field FILE NAME: prints a top-level field; nothing where file or field is missing.
json_field() {
    if [[ -e $1 ]]; then
        python3 -c '
import json, sys
with open(sys.argv[1]) as file:
    print(json.load(file).get(sys.argv[2]) or "")' "$1" "$2"
    fi
}

# training_program ARGUMENT...: the bundle's training/ under the interpreter that boot has found.
# Only here do the packages that boot installed count: the AWS CLI must not see another botocore.
training_program() {
    PYTHONPATH=$PWD:$packages "${PYTHON:-python3}" -m training "$@"
}

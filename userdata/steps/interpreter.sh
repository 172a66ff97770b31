#!/usr/bin/env bash
# Boot step: finds the interpreter that has torch and installs missing packages that training needs.
# Writes machine.env, which all later steps read.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

# has PYTHON MODULE...: whether the interpreter finds all of them; importing would take seconds.
has() {
    PYTHONPATH=$packages "$1" -c '
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))' "${@:2}"
}

find_python() {
    local candidate
    # The Deep Learning AMI has torch in /opt/pytorch, with a Python of its own.
    for candidate in "$root/opt/pytorch/bin/python" python3; do
        if command -v "$candidate" >/dev/null && has "$candidate" torch; then
            command -v "$candidate"
            return
        fi
    done
    refuse "no interpreter has torch (tried /opt/pytorch/bin/python and python3), as on a base" \
        "AMI; use a Deep Learning AMI with PyTorch (context pytorch_ami_parameter)"
}

# install FILE MODULE...: installs exactly what FILE pins if the interpreter lacks a MODULE, from
# the bundle's wheels or, for another Python or platform, from the package index.
install() {
    if has "$python" "${@:2}"; then
        return
    fi
    local pip=("$python" -m pip install --quiet --disable-pip-version-check --require-hashes
        --no-deps --upgrade --target "$packages" --requirement "$1")
    if ! "${pip[@]}" --no-index --find-links userdata/wheels; then
        echo "the bundle has no wheels that fit, so $1 comes from the package index"
        if ! "${pip[@]}"; then
            echo "$1 could not be installed, and the image lacks a package in it: use an image" \
                "that has it, or deploy after \`make setup\`, which fetches the bundle's wheels"
            return 1
        fi
    fi
}

python=$(find_python)
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    refuse "$("$python" --version) of this image is too old: training needs 3.11 or newer; use a" \
        "newer Deep Learning AMI (context pytorch_ami_parameter)"
install userdata/requirements.txt boto3 safetensors
install userdata/requirements-numpy.txt numpy
# Without it SHA-256 stands in, with ten times the work.
install userdata/requirements-xxhash.txt xxhash || echo "checksums are SHA-256 on this machine"
# Packages that only this workload needs: each file is named after the module that it installs.
for pins in userdata/requirements-"$WORKLOAD"/*.txt; do
    if [[ -e $pins ]]; then
        install "$pins" "$(basename "$pins" .txt)"
    fi
done
# The units that send events and metrics read this file, not lib.sh.
printf '%s\n' "PYTHON=$(printf %q "$python")" "INSTANCE_ID=$INSTANCE_ID" \
    "AWS_METADATA_SERVICE_TIMEOUT=$AWS_METADATA_SERVICE_TIMEOUT" \
    "AWS_METADATA_SERVICE_NUM_ATTEMPTS=$AWS_METADATA_SERVICE_NUM_ATTEMPTS" \
    >"$root/opt/training/machine.env"
"$python" -c '
import importlib.metadata as m, platform
print(f"Python {platform.python_version()} with torch", m.version("torch"))'

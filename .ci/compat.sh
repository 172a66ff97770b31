#!/usr/bin/env bash
# Tests training/ with the torch and Python of another image: first a boot on which only torch and
# torchvision are installed, then the tests, then runs that switch between that torch and ours.
# Usage: .ci/compat.sh TORCH [PYTHON], after `make setup`.
set -o errexit -o nounset -o pipefail
cd "$(dirname "$0")/.."

if [[ ! ${1:-} =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]]; then
    echo "TORCH is '${1:-}'; specify a version, as in: make compat TORCH=2.12.1 ARGS=3.13" >&2
    exit 2
fi
torch=$1 version=${2:-3.11}
environment=$PWD/.venv-compat/$torch
machine=$(mktemp -d)
uv=$PWD/.venv/bin/uv
python=$environment/bin/python
trap 'rm -rf "$machine"' EXIT
export OMP_NUM_THREADS=1

pip_install() {
    "$uv" pip install --quiet --python "$python" "$@"
}

echo "== torch $torch with its torchvision, Python $version, nothing else"
"$uv" venv --quiet --clear --seed --python "$version" "$environment"
pip_install "torch==$torch" torchvision

echo "== what boot installs, and the laptop recipe without any other package"
mkdir -p "$machine"/{etc,run,opt}/training
cp userdata/run.env.example "$machine/etc/training/run.env"
ln -s "$environment" "$machine/opt/pytorch"
MACHINE_ROOT=$machine INSTANCE_ID=i-0123456789abcdef0 bash userdata/steps/interpreter.sh
export PYTHONPATH=$PWD:$machine/opt/training/packages
"$python" -m training data make --workload trajectory --count 66 --out "$machine/data"
"$python" -m training run --workload trajectory --recipe laptop \
    --dataset-uri "$machine/data" --run-uri "$machine/run-1" | tail -n 4
"$python" -m training check trajectory --recipe laptop --dataset-uri "$machine/data"
unset PYTHONPATH

echo "== the tests, with everything in the lock except torch and what each torch pins"
awk '/^[a-z0-9]/ { is_torch = /^(torch|torchvision|triton|nvidia-.*|cuda-.*|setuptools)==/ } !is_torch' \
    requirements.txt requirements-{examples,formats}.txt >"$machine/lock"
pip_install --no-deps --require-hashes --requirement "$machine/lock"
"$python" -m pytest --quiet --numprocesses=3 --dist=loadfile tests/training tests/userdata

echo "== a run that starts with one torch and finishes with the other, both ways"
.venv/bin/python -m pytest --quiet -m slow tests/training/test_other_torch.py -k "$torch"

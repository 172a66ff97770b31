#!/usr/bin/env bash
# What training.service runs: turns run.env into the trainer's command line and becomes the trainer.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

if [[ -e $run/notice.json ]]; then
    echo "this machine has its notice: training does not start any more"
    exit 75
fi
set -- run --workload "$WORKLOAD" --recipe "$RECIPE"
# Overrides are words by contract; the shell must not take a star in one for file names.
set -o noglob
for override in $OVERRIDES; do
    set -- "$@" --override "$override"
done
# Until the trainer listens a signal would kill it; it looks for the notice file when it does.
trap '' USR1 USR2
export PYTHONPATH=$PWD:$packages
# exec: the main process of the unit, which gets the signals, is the trainer itself.
exec "$PYTHON" -m training "$@" \
    --dataset-uri "$root$DATA_MOUNT/dataset" \
    --run-uri "$RUN_URI" \
    --artifacts-uri "${RUN_URI%/runs/*}/artifacts" \
    --run-id "$RUN_ID" \
    --prediction "$PREDICTION" \
    --checkpoint-interval "$CHECKPOINT_INTERVAL" \
    --keep "$CHECKPOINTS_KEPT" \
    --notice-budget-seconds "$NOTICE_BUDGET_SECONDS" \
    --notice-file "$run/notice.json" \
    --notice-policy "$NOTICE_POLICY" \
    --lease-ttl-seconds "$LEASE_TTL_SECONDS" \
    --metrics-file "$root/var/log/training/metrics.jsonl" \
    --writer "$INSTANCE_ID" \
    --bundle-uri "$BUNDLE_URI" \
    --scratch "$root$DATA_MOUNT/scratch"

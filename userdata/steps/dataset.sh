#!/usr/bin/env bash
# Boot step: syncs the dataset to the data volume; waits if it has not been uploaded yet. Training
# may start once /run/training/dataset-begun exists.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

status=0
training_program data sync --dataset-uri "$DATASET_URI" --out "$root$DATA_MOUNT/dataset" \
    --wait-seconds "$DATASET_WAIT_SECONDS" --run-uri "$RUN_URI" --writer "$INSTANCE_ID" \
    --begun-file "$run/dataset-begun" || status=$?
if ((status == 3)); then
    refuse "no $DATASET_URI/manifest.json after $DATASET_WAIT_SECONDS s; upload the dataset with" \
        "'python -m training data upload DIR --dataset-uri $DATASET_URI', then deploy a new run_id"
elif ((status == 2)) && : >"$root$DATA_MOUNT/.writable"; then
    exit 78 # the sync's last line says why
elif ((status != 0)); then
    fail "the dataset could not be synced from $DATASET_URI (status $status); see the lines above"
fi

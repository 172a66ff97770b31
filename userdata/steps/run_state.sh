#!/usr/bin/env bash
# Boot step: reads the run's state (head.json) and its initial configuration (config.json).
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

state=$(run_state)
rm -f "$run/config.json"
if [[ -e $run/head.json ]]; then
    fetch_object "$RUN_URI/config.json" "$run/config.json"
fi
echo "run $RUN_ID is ${state:-new}"

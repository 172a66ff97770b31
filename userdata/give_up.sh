#!/usr/bin/env bash
# Ends the run for good: an event, the head marked failed, the fleet sent to zero. Usage: give_up.sh
# REASON. It never powers the machine off: a fleet of type maintain would replace it for ever.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

reason=$1
echo "[failed] run $RUN_ID: $reason"
python3 -m userdata.events run-given-up failed --message "$reason"
# Without an interpreter the head cannot be marked; the event and the fleet's end have to do.
if ! training_program fail --run-uri "$RUN_URI" --writer "${INSTANCE_ID:-unknown}" \
    --reason "$reason"; then
    echo "[failed] head: it could not be marked failed, the next machine of this run will try again"
    python3 -m userdata.events head-not-marked failed --message "$reason"
fi
exec bash userdata/fleet_to_zero.sh "$reason"

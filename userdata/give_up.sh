#!/usr/bin/env bash
# Ends the run for good: leaves an event, marks the head failed, sends the fleet to zero. It never
# powers the machine off: a maintain fleet would replace it forever. Usage: give_up.sh REASON
set -o errexit -o nounset -o pipefail
source userdata/lib.sh
carry_on

reason=$1
echo "[failed] run $RUN_ID: $reason"
python3 -m userdata.events run-given-up failed \
    --message "$reason; take it back with: python -m training reopen --run-uri $RUN_URI"
# Without an interpreter the head cannot be marked; the event and the empty fleet must suffice.
if ! training_program fail --run-uri "$RUN_URI" --writer "${INSTANCE_ID:-unknown}" \
    --reason "$reason"; then
    echo "[failed] head: could not be marked failed; the next machine of this run will try again"
    python3 -m userdata.events head-not-marked failed --message "$reason"
else
    : >"$run/given-up"
    (run_state >/dev/null) # for fleet_to_zero.sh; it may end its shell
fi
exec bash userdata/fleet_to_zero.sh "$reason"

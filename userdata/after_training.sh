#!/usr/bin/env bash
# Runs whenever the trainer exits (ExecStopPost): sends the fleet to zero if the head says that the
# run is over, never because of an exit status alone. It must not fail: systemd would count that as
# a failure of the trainer, which may have been interrupted and saved.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh
carry_on

how="${SERVICE_RESULT:-unknown}, ${EXIT_CODE:-} ${EXIT_STATUS:-}"
if ! state=$(run_state); then
    echo "after training: $how; the head could not be read; the Guard will stop the fleet if needed"
    exit 0
fi
echo "after training: $how; the head says ${state:-nothing}"
if [[ $state == finished || $state == failed ]]; then
    bash userdata/fleet_to_zero.sh "the run is $state"
fi
exit 0

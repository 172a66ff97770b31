#!/usr/bin/env bash
# Boot step: starts training; does nothing if it is running already.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

# Not enabled: after a restart of the machine, training-boot.service starts it when all is ready.
# --no-block: the unit's ordering may wait for the user data, which must not wait for the unit.
systemctl start --no-block training.service
echo "training.service started: $WORKLOAD, recipe $RECIPE"

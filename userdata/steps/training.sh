#!/usr/bin/env bash
# Boot step: starts training. A training that runs already is left alone.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

systemctl enable training.service
# Not waiting: the unit's own orderings must never hold up the user data, which they may wait for.
systemctl start --no-block training.service
echo "training.service started: $WORKLOAD, recipe $RECIPE"

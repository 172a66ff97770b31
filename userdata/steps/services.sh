#!/usr/bin/env bash
# Boot step: installs the bundle's units and starts those that send events and metrics.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

mkdir -p "$root/etc/systemd/system"
cp userdata/units/*.service "$root/etc/systemd/system/"
systemctl daemon-reload
systemctl enable --now training-events.service
systemctl enable --now training-metrics.service
echo "units installed, events go to $RUN_URI/events/, metrics to CloudWatch"

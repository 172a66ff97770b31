#!/usr/bin/env bash
# Boot step: installs the units of the bundle and starts the one that sends events.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

mkdir -p "$root/etc/systemd/system"
cp userdata/units/*.service "$root/etc/systemd/system/"
systemctl daemon-reload
systemctl enable --now training-events.service
echo "units installed, events are sent to $RUN_URI/events/"

#!/usr/bin/env bash
# Boot step: installs the bundle's units and starts those that send events and metrics.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

mkdir -p "$root/etc/systemd/system"
cp userdata/units/*.service "$root/etc/systemd/system/"
# Packages are the image's: no upgrade may replace the driver or restart the trainer in mid-run.
mkdir -p "$root/etc/apt/apt.conf.d" "$root/etc/needrestart/conf.d"
cp userdata/no-upgrades.conf "$root/etc/apt/apt.conf.d/99-training.conf"
cp userdata/needrestart.conf "$root/etc/needrestart/conf.d/training.conf"
systemctl daemon-reload
systemctl enable --now training-events.service
systemctl enable --now training-metrics.service
echo "units installed, events go to $RUN_URI/events/, metrics to CloudWatch"

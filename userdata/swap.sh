# shellcheck shell=bash
# Sourced in /opt/training, from bundle.next: a run's older bundle and its run.env take the place of
# this machine's. May be done again from any point on, as training-boot.service does if bundle.next
# is still there after a power-off.
set -o errexit -o nounset -o pipefail
cp bundle.next/run.env ../../etc/training/run.env.new
mv ../../etc/training/run.env.new ../../etc/training/run.env
sync -f . # without bundle.next, nothing would copy run.env again
rm -rf bundle
mv bundle.next bundle

#!/bin/sh
# Runs one machine, and again after each reboot, in its own network namespace, which has its card.
# Usage: power_on.sh CARD FOLDER GROUP... -- NSPAWN...; FOLDER is empty, GROUPs are control groups.
set -o errexit -o nounset

card=$1 folder=$2
shift 2
while [ "$1" != -- ]; do
    echo 0 >"$1/cgroup.procs"
    shift
done
shift
# Let /sys show this network namespace.
mount --rbind /sys/fs/cgroup "$folder"
mount -t sysfs sysfs /sys
mount --rbind "$folder" /sys/fs/cgroup
umount --lazy "$folder"
reboot=133
status=$reboot
while [ $status -eq $reboot ]; do
    # nspawn accepts a card only if udev, which does not run here, has seen it.
    echo I:1 >"/run/udev/data/n$(cat "/sys/class/net/$card/ifindex")"
    status=0
    "$@" || status=$?
done
exit $status

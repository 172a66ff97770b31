#!/usr/bin/env bash
# Probes whether this host can boot the machines of the tests marked machine: tries each capability
# on its own, using only the host's programs and the root image. If one is missing, the last line
# names it and the exit status is 75.
# Usage, as root: .ci/probe_machines.sh ROOT_IMAGE
set -o errexit -o nounset -o pipefail

CANNOT=75 PATIENCE_SECONDS=120

# needs WHAT COMMAND...: ends the probe if the command fails.
needs() {
    local what=$1 said last
    shift
    said=$("$@" 2>&1) || {
        last=$(tail -n 1 <<<"$said")
        echo "this host cannot boot machines: no $what${last:+: $last}"
        exit $CANNOT
    }
}

boots() {
    # It has its own control group, because nspawn creates others in it.
    echo 0 >"$1/cgroup.procs"
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 systemd-nspawn --quiet --directory="$2" --boot \
        --register=no --keep-unit --settings=no --console=pipe --link-journal=no \
        --resolv-conf=off --timezone=off --capability=all --private-network \
        systemd.unit=poweroff.target
}

limits_memory() {
    if [[ -d $cgroup/memory ]]; then
        test -e "$cgroup/memory/memory.limit_in_bytes"
    else
        echo +memory >"$version_2/cgroup.subtree_control"
    fi
}

cgroup=/sys/fs/cgroup
version_2=$cgroup
if [[ -d $cgroup/unified ]]; then version_2=$cgroup/unified; fi

if [[ $1 != inside ]]; then
    folder=$(mktemp -d)
    group=$version_2/probe-$$
    trap '
        rm -rf "$folder"
        find "$cgroup" -depth -path "*/probe-$$*" -type d -exec rmdir {} + || true
    ' EXIT
    needs "control groups of version 2" mkdir "$group"
    needs "cgroup.kill (Linux 5.14)" test -e "$group/cgroup.kill"
    needs "memory limit" limits_memory
    needs "namespaces" unshare --mount --pid --net --fork --mount-proc true
    # Everything created in these namespaces ends with them.
    status=0
    timeout --kill-after=5 $PATIENCE_SECONDS \
        unshare --mount --pid --net --fork --kill-child --mount-proc \
        "$0" inside "$1" "$folder" "$group" || status=$?
    if [[ $status == 124 || $status == 137 ]]; then
        echo "this host cannot boot machines: not done within $PATIENCE_SECONDS s"
        status=$CANNOT
    fi
    exit $status
fi

image=$2 folder=$3 group=$4
mkdir "$folder"/{upper,work,root,mounted}
truncate --size=400M "$folder/disk"
needs "private /run" mount -t tmpfs tmpfs /run
needs "bridge" ip link add bridge type bridge
needs "named network namespaces" ip netns add machine
needs "veth" ip link add outside type veth peer name inside netns machine
needs "overlay on $folder" mount -t overlay overlay \
    -o "lowerdir=$image,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
needs "XFS" mkfs.xfs -q "$folder/disk"
needs "loop device with XFS" mount -o loop "$folder/disk" "$folder/mounted"
mkdir -p /run/systemd/nspawn
needs "machine in systemd-nspawn" boots "$group" "$folder/root"

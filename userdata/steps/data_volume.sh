#!/usr/bin/env bash
# Boot step: mounts the data volume, or the instance store in its place. It creates a file system
# only if neither blkid nor wipefs finds anything at all, so it never formats existing data.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

mount_point=$root$DATA_MOUNT
if [[ $DATA_ON == ebs ]]; then
    device=$(python3 -m userdata.find_data_disk "$DATA_DEVICE_NAME")
else
    device=$(python3 -m userdata.find_instance_store "$DATA_MOUNT")
fi
if [[ $device != /dev/* ]]; then
    mkdir -p "$mount_point"
    # Not in fstab: at a restart, the image mounts its disks after fstab's.
    findmnt --noheadings --output UUID --mountpoint "$mount_point" ||
        mount --bind "$root$device" "$mount_point"
    echo "the instance store that the image has mounted at $device is also at $DATA_MOUNT"
    exit
fi
# A low-level probe, because the cache may still describe an earlier disk of this name.
type=$(blkid --probe --match-tag TYPE --output value "$device") || type=
made=found
if [[ -z $type ]]; then
    signatures=$(wipefs --noheadings "$device")
    if [[ -n $signatures ]]; then
        fail "$device contains something other than a file system, left untouched: $signatures;" \
            "attach an empty volume, or one whose file system spans the entire disk"
    fi
    mkfs.xfs -q "$device"
    type=xfs made=made
fi
uuid=$(blkid --probe --match-tag UUID --output value "$device")

mkdir -p "$mount_point"
fstab=$root/etc/fstab
touch "$fstab"
awk -v mount="$DATA_MOUNT" '$2 != mount' "$fstab" >"$fstab.new"
# nofail: a machine that reboots without its volume must still come up and report it.
echo "UUID=$uuid $DATA_MOUNT $type defaults,nofail,noatime,x-systemd.device-timeout=30 0 2" \
    >>"$fstab.new"
mv "$fstab.new" "$fstab"
systemctl daemon-reload

mounted=$(findmnt --noheadings --output UUID --mountpoint "$mount_point") || mounted=
if [[ -z $mounted ]]; then
    mount "$mount_point"
elif [[ $mounted != "$uuid" ]]; then
    fail "$mounted is mounted at $DATA_MOUNT instead of $uuid of $device; unmount it"
fi
echo "$device at $DATA_MOUNT, $type file system $made, UUID $uuid"

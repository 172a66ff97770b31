#!/usr/bin/env bash
# Runs when training.service failed for good: no restarts left, or a mistake that none would fix.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

property() {
    systemctl show --property="$1" --value training.service
}

# From systemd 254 on, OnFailure= also runs before every restart, unless RestartMode=direct.
if [[ $(property ActiveState) != failed ]]; then
    echo "training.service is $(property ActiveState), not failed for good"
    exit 0
fi
log=$root/var/log/training/training.log
last=$(grep -v -e '^$' -e '^after training: ' "$log" | tail -n 1 || true)
exec bash userdata/give_up.sh \
    "training failed for good ($(property Result), exit status $(property ExecMainStatus)): $last"

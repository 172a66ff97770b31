#!/usr/bin/env bash
# Asks EC2 to terminate this machine until it agrees. It does not stop or power it off: a fleet of
# type maintain replaces what was terminated, and a stopped machine would keep its volumes.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh
carry_on

until error=$(aws_cli ec2 terminate-instances --instance-ids "$INSTANCE_ID" 2>&1 >/dev/null); do
    error=${error##*$'\n'}
    echo "[failed] machine $INSTANCE_ID: it cannot terminate itself: $error"
    if [[ ! -e $run/terminate-failed ]]; then
        : >"$run/terminate-failed"
        python3 -m userdata.events terminate-failed failed \
            --message "the Guard terminates this machine: $error"
        python3 -m userdata.send_events --once || true
    fi
    sleep "${TERMINATE_RETRY_SECONDS:-60}"
done
echo "[ok] machine $INSTANCE_ID: EC2 terminates it"
exit 0

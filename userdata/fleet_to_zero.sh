#!/usr/bin/env bash
# Sends this stack's fleet to zero, and ends this machine. Usage: fleet_to_zero.sh REASON
set -o errexit -o nounset -o pipefail
source userdata/lib.sh
carry_on

reason=$1
before=$(json_field "$run/head.json" state)
# A Spot fleet then gives this very machine a notice; the handler must know that we caused it.
: >"$run/stopping"
python3 -m userdata.events fleet-to-zero info --message "$reason"
python3 -m userdata.send_events --once || echo "some events could not be sent"

# to_zero_call: a Spot fleet, or the two Auto Scaling groups of a fleet, of which only one has a
# machine: a group ends it at once, so this one may be gone before the call returns.
to_zero_call() {
    if [[ $fleet == sfr-* ]]; then
        aws_cli ec2 modify-spot-fleet-request --spot-fleet-request-id "$fleet" \
            --target-capacity 0 --on-demand-target-capacity 0
        return
    fi
    local group
    for group in "$fleet" "$fleet.on-demand"; do
        aws_cli autoscaling update-auto-scaling-group --auto-scaling-group-name "$group" \
            --min-size 0 --max-size 0 --desired-capacity 0 || return
    done
}
to_zero() {
    local answer
    # The parameter is created after the fleet: the first machine may boot before it exists.
    fleet=$(aws_cli ssm get-parameter --name "$FLEET_PARAMETER" \
        --query Parameter.Value --output text) || return
    if ! answer=$(to_zero_call 2>&1); then
        echo >&2 "$answer"
        # A cancelled fleet starts no more machines; the Guard ends those that it left running.
        [[ $answer == *cancelled* || $answer == *"name not found"* ]]
    fi
}
# reopened: whether a person has taken the run's end back while EC2 did not answer.
reopened() {
    local now
    [[ $before == finished || $before == failed ]] && now=$(run_state) &&
        [[ -n $now && $now != "$before" ]]
}

attempts=${FLEET_ATTEMPTS:-10}
until to_zero; do
    if ! ((attempts -= 1)); then
        echo "[failed] fleet to zero: see above; the Guard will stop the fleet"
        python3 -m userdata.events fleet-to-zero failed --message "EC2 did not accept the change"
        python3 -m userdata.send_events --once || true
        exit 1
    fi
    sleep "${FLEET_RETRY_SECONDS:-6}"
    if reopened; then
        echo "[ok] the run was reopened: the fleet stays, and replaces this machine"
        python3 -m userdata.events fleet-to-zero info --message "the run was reopened"
        python3 -m userdata.send_events --once || true
        exec bash userdata/terminate.sh
    fi
done
echo "[ok] fleet $fleet to zero: $reason"
# A Spot fleet gives its Spot machines a notice. One on demand it leaves alone: it would be paid for
# until the Guard ends it, a quarter of an hour later.
market=$(python3 -c '
from userdata.metadata import InstanceMetadata
print(InstanceMetadata().read("meta-data/instance-life-cycle"))' 2>/dev/null)
if [[ $fleet == sfr-* && $market == on-demand ]]; then
    aws_cli ec2 terminate-instances --instance-ids "$INSTANCE_ID" >/dev/null ||
        echo "machine $INSTANCE_ID: it cannot terminate itself; the Guard does"
fi
exit 0

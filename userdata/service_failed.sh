#!/usr/bin/env bash
# Runs when a service has failed for good (OnFailure=): ends the run if it would fail on any
# machine, otherwise only this machine. Usage: service_failed.sh SERVICE
set -o errexit -o nounset -o pipefail
source userdata/lib.sh
carry_on

service=$1
log=$root/var/log/training/training.log
own_log=$log
[[ $service == training.service ]] || own_log=$root/var/log/training/boot.log
# The unit does not do this: systemd would not start it if the log could not be written.
{ : >>"$own_log"; } 2>/dev/null && exec >>"$own_log" 2>&1
property() {
    systemctl show --property="$1" --value "$service"
}
# out_of_memory: whether systemd saw the kernel kill a process of the service's last start to free
# memory; the ID is that of SD_MESSAGE_UNIT_OUT_OF_MEMORY, whose text may change.
out_of_memory() {
    local start
    start=$(property InvocationID)
    [[ -n $start && -n $(journalctl --quiet --lines=1 "INVOCATION_ID=$start" \
        MESSAGE_ID=fe6faa94e7774663a0da52717891d8ef) ]]
}

# From systemd 254 on, OnFailure= also runs before every restart, unless RestartMode=direct.
state=$(property ActiveState)
if [[ -n $state && $state != failed ]]; then
    echo "$service is $state, not failed for good"
    exit 0
fi
if state=$(run_state) && [[ $state == finished || $state == failed ]]; then
    exec bash userdata/fleet_to_zero.sh "the run is $state"
elif [[ -e $run/given-up && -n $state ]]; then
    echo "the run was reopened: the fleet replaces this machine, which had given it up"
    exec bash userdata/terminate.sh
fi
result=$(property Result) status=$(property ExecMainStatus)
how="$result, exit status $status"
if out_of_memory; then
    how+="; the kernel killed a process of it: out of memory"
fi
place=
if [[ $service == training.service ]]; then
    users_mistake=2
    last=$(grep -a -v -e '^$' -e '^after training: ' "$log" | tail -n 1 | tail -c 1000)
    why="training failed ($how): $last"
    if fault=$(python3 -m userdata.gpu_fault); then
        # A trial step on a failed GPU looks like the user's mistake.
        why="$fault ($how)" users_mistake=
    elif ((status != 4 && status != 74 && status != 76)); then
        place=$(python3 -m userdata.failure_place)
    fi
else
    users_mistake=78
    why="boot failed at $(cat "$run/boot-failure" || echo "no step: bootstrap.sh ended ($how)")"
fi
# Linux limits an argument of a program to 128 KiB; either cut may be within a letter.
why=$(iconv -c -f utf-8 -t utf-8 <<<"${why:0:4000}" || true)
# A signal has a number too: SIGINT is 2.
if [[ $result == exit-code && $status == "$users_mistake" ]]; then
    exec bash userdata/give_up.sh "$why"
fi

echo "[failed] machine $INSTANCE_ID: $why"
python3 -m userdata.events machine-failed failed --message "$why" ${place:+--place "$place"}
# Sent before other machines' events are read, so if two fail at once, one sees the other.
python3 -m userdata.send_events --once || echo "some events could not be sent"
if [[ -n $place ]] && other=$(python3 -m userdata.failure_place --of-others "$place"); then
    exec bash userdata/give_up.sh "$why; $other failed there too: $place"
fi
exec bash userdata/terminate.sh

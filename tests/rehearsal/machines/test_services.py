"""systemctl of process machines: starts, restarts, limits, stops and refusals like systemd's."""

from pathlib import Path

from tests.rehearsal.machines.conftest import Power

WAITING = """[Service]
ExecStart=bash -c 'trap "echo got USR1" USR1; trap "echo got TERM; exit 0" TERM; echo up; \
while :; do sleep 0.05; done'
StandardOutput=append:/var/log/training/training.log
"""
FAILING = """[Unit]
StartLimitBurst=3
StartLimitIntervalSec=1h
OnFailure=after.service
[Service]
ExecStart=bash -c 'echo attempt; exit 7'
ExecStopPost=bash run/stop-post
Restart=on-failure
RestartSec=50ms
RestartMode=direct
StandardOutput=append:/var/log/training/training.log
"""
AFTER = """[Service]
Type=oneshot
ExecStart=bash -c 'echo failed for good'
StandardOutput=append:/var/log/training/training.log
"""
STOP_POST = (
    "echo 'echo stopped $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS' > $MACHINE_ROOT/run/stop-post"
)


def test_signals_reach_the_main_process_only_when_there_is_one(power: Power) -> None:
    machine = power(
        """systemctl daemon-reload
        systemctl kill --kill-whom=main --signal=SIGUSR1 a.service || echo "refused $?"
        systemctl enable --now a.service
        until grep -q up "$MACHINE_ROOT/var/log/training/training.log"; do sleep 0.05; done
        systemctl is-active a.service
        systemctl kill --kill-whom=main --signal=SIGUSR1 a.service
        until grep -q USR1 "$MACHINE_ROOT/var/log/training/training.log"; do sleep 0.05; done
        systemctl stop a.service
        systemctl is-active a.service || echo "status $?"
        ls "$MACHINE_ROOT/etc/systemd/system/multi-user.target.wants"
        """,
        a=WAITING + "[Install]\nWantedBy=multi-user.target",
    )
    assert machine.wait(60, "a.service")
    assert machine.wait(60, "status 3")
    lines = machine.log_lines()
    assert "Failed to kill unit a.service: No main process to kill" in lines
    for line in ("refused 1", "active", "got USR1", "got TERM", "inactive"):
        assert line in lines


def test_restarts_end_at_the_limit_and_then_on_failure_runs_once(power: Power) -> None:
    machine = power(
        f"{STOP_POST}\nsystemctl daemon-reload\nsystemctl start --no-block a.service",
        a=FAILING,
        after=AFTER,
    )
    assert machine.wait(60, "failed for good")
    lines = machine.log_lines()
    assert lines.count("attempt") == 3
    assert lines.count("stopped exit-code exited 7") == 3
    assert lines.count("failed for good") == 1


def test_without_direct_restarts_every_failure_counts_as_from_systemd_254_on(power: Power) -> None:
    machine = power(
        f"{STOP_POST}\nsystemctl daemon-reload\nsystemctl start --no-block a.service",
        a=FAILING.replace("RestartMode=direct\n", ""),
        after=AFTER,
    )
    assert machine.wait(60, "failed for good")
    assert machine.log_lines().count("attempt") < 3


def test_statuses_named_as_success_or_no_reason_to_restart_are_honoured(power: Power) -> None:
    show = "systemctl show --property=ActiveState,Result,NRestarts,ExecMainStatus"
    machine = power(
        f"""{STOP_POST}
        systemctl daemon-reload
        systemctl start a.service b.service
        until {show} a.service | grep -q ActiveState=inactive; do sleep 0.05; done
        until {show} b.service | grep -q ActiveState=failed; do sleep 0.05; done
        {show} --value a.service b.service | xargs
        """,
        a=FAILING.replace("[Service]", "[Service]\nSuccessExitStatus=7"),
        b=FAILING.replace("[Service]", "[Service]\nRestartPreventExitStatus=7"),
        after=AFTER,
    )
    assert machine.wait(60, "inactive success 0 7 failed exit-code 0 7")


def test_a_service_that_does_not_stop_is_killed_with_all_it_started(power: Power) -> None:
    stubborn = 'trap "" TERM; (sleep 600 &); echo up; while :; do sleep 0.05; done'
    machine = power(
        """systemctl daemon-reload
        systemctl start a.service
        until grep -q up "$MACHINE_ROOT/var/log/training/training.log"; do sleep 0.05; done
        systemctl stop a.service
        systemctl show -p Result --value a.service""",
        a=f"""[Service]
ExecStart=bash -c '{stubborn}'
TimeoutStopSec=300ms
StandardOutput=append:/var/log/training/training.log""",
    )
    assert machine.wait(60, "timeout")
    assert [p for p in machine.processes() if "sleep" in p.name()] == []


def test_fails_on_unknown_directives_units_and_verbs_by_name(power: Power) -> None:
    machine = power(
        """systemctl reload a.service || true
        systemctl start b.service || true
        systemctl daemon-reload || echo the end
        """,
        a="[Service]\nExecStart=/bin/true\nCPUQuota=50%",
    )
    assert machine.wait(60, "the end")
    log = "\n".join(machine.log_lines())
    assert "invalid choice: 'reload'" in log
    assert "Unit b.service could not be found." in log
    assert "a.service: process machines do not support 'CPUQuota=50%'" in log


def test_a_service_that_no_longer_pings_is_aborted_and_restarted(power: Power) -> None:
    program = (
        "import os, socket, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
        '[(s.sendto(b"WATCHDOG=1", os.environ["NOTIFY_SOCKET"]), time.sleep(0.5)) '
        'for _ in range(4)]; print("silent", flush=True); time.sleep(60)'
    )
    machine = power(
        f"{STOP_POST}\nsystemctl daemon-reload\nsystemctl start --no-block a.service",
        a=f"""[Unit]
StartLimitBurst=2
StartLimitIntervalSec=1h
[Service]
ExecStart=python3 -c '{program}'
ExecStopPost=bash run/stop-post
WatchdogSec=1500ms
Restart=on-failure
RestartSec=50ms
RestartMode=direct
StandardOutput=append:/var/log/training/training.log
""",
    )
    assert machine.wait(30, "stopped watchdog killed ABRT")
    lines = machine.log_lines()
    assert lines.index("silent") < lines.index("a.service: no ping within 1.5 s: aborting")


def test_a_machine_that_is_killed_leaves_no_socket_of_its_services(power: Power) -> None:
    program = "import os, time; print(os.environ['NOTIFY_SOCKET'], flush=True); time.sleep(60)"
    machine = power(
        "mkdir -p $MACHINE_ROOT/var/log/training\nsystemctl daemon-reload\n"
        "systemctl start --no-block a.service",
        a=f"""[Service]
ExecStart=python3 -c "{program}"
WatchdogSec=30
StandardOutput=append:/var/log/training/training.log
""",
    )
    assert machine.wait(30, "/socket")
    (told,) = (line for line in machine.log_lines() if line.endswith("/socket"))
    assert Path(told).is_socket()
    machine.kill()
    assert not Path(told).parent.exists()

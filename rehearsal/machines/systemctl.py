#!/usr/bin/env -S python3 -I -S
"""systemctl of a process machine: passes the request to the machine's init.

It supports what the boot programs use and refuses the rest by name. Standard library only.
"""

import argparse
import json
import os
import socket
import sys

VERBS = ("daemon-reload", "enable", "start", "stop", "kill", "is-active", "show")
NOT_ACTIVE = 3


def parse_arguments() -> argparse.Namespace:
    """Read the command line, with systemctl's own names."""
    parser = argparse.ArgumentParser(prog="systemctl", description=__doc__, allow_abbrev=False)
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("units", nargs="*")
    parser.add_argument("--now", action="store_true")
    parser.add_argument("--no-block", action="store_true")
    parser.add_argument("--value", action="store_true")
    parser.add_argument("--kill-whom", choices=("main",))
    parser.add_argument("--signal", "-s", default="SIGTERM")
    parser.add_argument("--property", "-p")
    arguments = parser.parse_intermixed_args()
    if arguments.verb == "kill" and arguments.kill_whom is None:
        parser.error("process machines support kill only with --kill-whom=main")
    if arguments.verb == "show" and arguments.property is None:
        parser.error("process machines support show only with --property")
    return arguments


def main() -> int:
    """Send the request to init, print its reply, return systemctl's exit status."""
    arguments = parse_arguments()
    options = {"signal": arguments.signal, "property": arguments.property or ""}
    flags = ("now", "no_block", "value")
    options |= {flag.replace("_", "-"): "yes" for flag in flags if getattr(arguments, flag)}
    request = {"verb": arguments.verb, "units": arguments.units, "options": options}
    # A relative path: the address of a Unix socket is limited to about 100 characters.
    os.chdir(os.environ["MACHINE_ROOT"] + "/run")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("systemd.socket")
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile() as answers:
            line = answers.readline()
    if not line:
        print("systemctl: the machine's init hung up; see var/log/init.log", file=sys.stderr)
        return 1
    reply = json.loads(line)
    if "error" in reply:
        print(reply["error"], file=sys.stderr)
        return 1
    if reply["output"]:
        print(reply["output"])
    if arguments.verb == "is-active" and "active" not in reply["output"].split():
        return NOT_ACTIVE
    return 0


if __name__ == "__main__":
    sys.exit(main())

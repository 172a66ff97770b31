#!/usr/bin/env -S python3 -I -S
"""The AWS CLI of a process machine: the real one, in forks of a process that has imported it.

Run as `aws`, it passes its arguments, environment, folder and standard streams to a fork, which
ends when it does. At the first call the machine's init starts the process that forks.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Never

SOCKET = "aws.socket"
_STANDARD = (0, 1, 2)
_KILLED = 128 + signal.SIGKILL


def call(arguments: list[str]) -> int:
    """Have the CLI run in a fork; return its exit status."""
    request = json.dumps([arguments, dict(os.environ), str(Path.cwd())]).encode()
    # A relative path: the address of a Unix socket is limited to about 100 characters.
    os.chdir(os.environ["MACHINE_ROOT"] + "/run")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(SOCKET)
        socket.send_fds(connection, [b"%8d" % len(request)], _STANDARD)
        connection.sendall(request)
        return (connection.recv(1) or bytes([_KILLED]))[0]


def serve(listener: socket.socket) -> Never:
    """Fork for each call, which finds what every command would import, read and build."""
    import awscli.clidriver

    driver = awscli.clidriver.create_clidriver()
    driver.create_help_command()  # builds the table of commands
    for name in ("s3.s3", "s3.subcommands", "s3.s3handler", "waiters"):
        __import__(f"awscli.customizations.{name}")
    loader = driver.session.get_component("data_loader")
    for name in ("endpoints", "partitions", "sdk-default-configuration", "_retry"):
        loader.load_data(name)
    for name in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model("s3", name)
    # The caller may have a configuration of its own.
    driver.session._config = driver.session._profile_map = None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.sendall(bytes([_run(connection, driver.main)]))
            os._exit(0)
        connection.close()


def _run(connection: socket.socket, main: Callable[[], int]) -> int:
    """Run the CLI for one caller; return its exit status."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, len(_STANDARD))
    arguments, environment, folder = json.loads(connection.recv(int(size), socket.MSG_WAITALL))
    # From here on, the end of the caller ends this process, too.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        connection.recv(1, socket.MSG_DONTWAIT)
        os._exit(_KILLED)  # the caller had ended before
    for number, descriptor in zip(_STANDARD, descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    # The CLI sets one variable when it is imported: the path of its data.
    environment.setdefault("AWS_DATA_PATH", os.environ["AWS_DATA_PATH"])
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["aws", *arguments]
    try:
        return int(main()) & 255
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 255
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    if Path(sys.argv[0]).name == "aws":
        sys.exit(call(sys.argv[1:]))
    # A copy, as each fork replaces standard input.
    serve(socket.socket(fileno=os.dup(0)))

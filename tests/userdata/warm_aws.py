"""The AWS CLI in forks of one warm interpreter: the same program without its imports.

`python warm_aws.py serve SOCKET` serves; `python -I -S warm_aws.py call SOCKET ARGUMENTS...` stands
for `aws ARGUMENTS...`, which ends when its caller does.
"""

import fcntl
import json
import os
import socket
import sys
import traceback
from pathlib import Path

STANDARD = (0, 1, 2)


def call(path: str, arguments: list[str]) -> int:
    """Hand over the arguments, environment, folder and standard streams; return the exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        said = json.dumps([arguments, dict(os.environ), str(Path.cwd())]).encode()
        socket.send_fds(connection, [b"%8d" % len(said)], STANDARD)
        connection.sendall(said)
        # Nothing comes if it was killed.
        return (connection.recv(1) or b"\x01")[0]


def serve(path: str) -> None:
    """Fork for each call."""
    import signal

    import awscli.clidriver

    awscli.clidriver.create_clidriver()  # imports what every command needs
    for name in ("s3.s3", "s3.subcommands", "s3.s3handler", "waiters"):
        __import__(f"awscli.customizations.{name}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _run(connection)
            connection.close()


def _run(connection: socket.socket) -> None:
    """Be the CLI of one caller."""
    import signal

    import awscli.clidriver

    code = 255
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        size, descriptors, _, _ = socket.recv_fds(connection, 8, len(STANDARD))
        said = connection.recv(int(size), socket.MSG_WAITALL)
        # From here on a caller that goes away takes this process with it.
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
        for number, descriptor in zip(STANDARD, descriptors, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        arguments, environment, folder = json.loads(said)
        os.chdir(folder)
        # The CLI sets one variable where it is imported: the place of its data.
        environment.setdefault("AWS_DATA_PATH", os.environ["AWS_DATA_PATH"])
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["aws", *arguments]
        code = awscli.clidriver.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([code & 255]))
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(call(sys.argv[2], sys.argv[3:]))

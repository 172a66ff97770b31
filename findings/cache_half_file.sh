#!/usr/bin/env bash
# fsspec 2026.9.0: its two caches of whole files download under the final name. simplecache takes
# any file that is there for complete: what a kill leaves of a download is what every later process
# reads, without an error; the end of the data is missing (with s3fs 2026.9.0, too). After a lost
# connection, the first attempt raises, and a retry in the same process reads the half, with
# filecache as well: it notes a file before the download, and writes the note to the disk with the
# next file that it opens. A disk that outlives the machine keeps the half. Comparing sizes helps,
# or fetching to another name and renaming the file.
# Seen: 4,000,000 of 8,000,000 bytes, but for filecache after SIGTERM: all of them.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    fsspec==2026.9.0 aiohttp==3.14.5
cd "$folder"
cat >drill.py <<'PY'
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import fsspec

SIZE = 8_000_000
whole, ended = Event(), Event()


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(bytes(SIZE if whole.is_set() else SIZE // 2))
        ended.wait()  # only then is the connection closed

    def log_message(self, *_):
        pass


def read(kind, url, folder):
    with fsspec.open(f"{kind}::{url}", "rb", **{kind: {"cache_storage": folder}}) as file:
        return len(file.read())


if sys.argv[1:]:
    print(read(*sys.argv[1:]))
    sys.exit()
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.handle_error = lambda *_: None  # a client that was killed
Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"
seen = []
for kind in ("simplecache", "filecache"):
    process = [sys.executable, "drill.py", kind, f"{url}tokens"]
    whole.clear(), ended.clear()
    first = subprocess.Popen([*process, f"{kind}-1"])
    while not any(path.stat().st_size == SIZE // 2 for path in Path(f"{kind}-1").glob("*")):
        time.sleep(0.1)
    first.terminate(), first.wait(), ended.set()
    try:
        read(kind, f"{url}tokens", f"{kind}-2")
    except Exception as error:
        print(f"{kind}: {type(error).__name__}")
    whole.set()
    retry = read(kind, f"{url}tokens", f"{kind}-2")
    read(kind, f"{url}others", f"{kind}-2")
    killed, lost = (int(subprocess.check_output([*process, f"{kind}-{n}"])) for n in (1, 2))
    print(f"{kind}: killed, next process {killed:,}; lost, retry {retry:,}, next process {lost:,}")
    seen += [killed, retry, lost]
sys.exit(seen != 3 * [SIZE // 2] + [SIZE] + 2 * [SIZE // 2])
PY
venv/bin/python drill.py

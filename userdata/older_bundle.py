"""Rewrite run.env for the older bundle that a run keeps, which refuses names it does not know.

The launch template may have gained variables and trainer options since the run started. Run:
python3 -m userdata.older_bundle RUN_ENV BUNDLE_ZIP
"""

import subprocess
import sys
import zipfile
from pathlib import Path

from contract.trainer_options import read_words, write_words
from userdata.run_env import read_run_env, write_run_env

EXAMPLE = "userdata/run.env.example"
_LIST_OPTIONS = "from contract.trainer_options import OPTIONS; print(*OPTIONS)"


def cut(run_env: Path, bundle: Path) -> list[str]:
    """Rewrite `run_env`; return the names that were removed."""
    known = run_env.with_name("run.env.example")
    with zipfile.ZipFile(bundle) as archive:
        known.write_bytes(archive.read(EXAMPLE))
    names = read_run_env(known).keys()
    known.unlink()
    variables = read_run_env(run_env)
    options = read_words(variables["TRAINER_OPTIONS"].strip('"'))
    understood = set(_options_of(bundle))
    words = {name: text for name, text in options.items() if name in understood}
    kept = {name: value for name, value in variables.items() if name in names}
    write_run_env(run_env, {**kept, "TRAINER_OPTIONS": f'"{write_words(words)}"'})
    ignored = [f"train.{name}" for name in options if name not in understood]
    return sorted([*(variables.keys() - names), *ignored])


def _options_of(bundle: Path) -> list[str]:
    """Return the trainer options of the bundle's own contract, which Python reads from the zip."""
    # Run in the bundle's folder, or another contract would be found first.
    done = subprocess.run(
        [sys.executable, "-c", _LIST_OPTIONS],
        cwd=bundle.parent,
        env={"PYTHONPATH": str(bundle)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def main() -> int:
    """Rewrite the file, and print what was removed."""
    run_env, bundle = map(Path, sys.argv[1:])
    unknown = cut(run_env, bundle)
    if unknown:
        print(f"[ok] ignoring {', '.join(unknown)}, unknown to the run's older bundle")
    return 0


if __name__ == "__main__":
    sys.exit(main())

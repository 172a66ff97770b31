"""Remove from run.env the variables that an older bundle does not know and would refuse.

The launch template may have gained variables since the run started; the run keeps its bundle, which
ignores them. Run: python3 -m userdata.older_bundle RUN_ENV BUNDLE_ZIP
"""

import sys
import zipfile
from pathlib import Path

from userdata.run_env import read_run_env

EXAMPLE = "userdata/run.env.example"


def cut(run_env: Path, bundle: Path) -> list[str]:
    """Rewrite `run_env`; return the names that were removed."""
    known = run_env.with_name("run.env.example")
    with zipfile.ZipFile(bundle) as archive:
        known.write_bytes(archive.read(EXAMPLE))
    names = read_run_env(known).keys()
    known.unlink()
    variables = read_run_env(run_env)
    kept = [f"{name}={value}\n" for name, value in variables.items() if name in names]
    run_env.write_text("".join(kept))
    return sorted(variables.keys() - names)


def main() -> int:
    """Rewrite the file, and print what was removed."""
    run_env, bundle = map(Path, sys.argv[1:])
    unknown = cut(run_env, bundle)
    if unknown:
        print(f"[ok] ignoring {', '.join(unknown)}, unknown to the run's older bundle")
    return 0


if __name__ == "__main__":
    sys.exit(main())

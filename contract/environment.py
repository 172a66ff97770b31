"""Says what to type where a command's interpreter lacks a package, instead of a traceback.

Each package with commands imports this first; it acts only under `python -m`, in a checkout, with
another interpreter than that of the environment that `make setup` makes.
"""

import shlex
import sys
from pathlib import Path
from types import TracebackType

_VENV = Path(__file__).parents[1] / ".venv"


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ImportError):
        return sys.__excepthook__(kind, error, trace)
    activate = f"source {shlex.quote(str(_VENV / 'bin/activate'))}"
    why = f"{error}: {sys.executable} is not this project's environment"
    what = f"run `make setup` once in {_VENV.parent}, then type `{activate}`, and the command again"
    return print(f"error: {why}; {what}", file=sys.stderr)


_IS_OTHER = _VENV.with_name("Makefile").is_file() and _VENV.resolve() != Path(sys.prefix).resolve()
if _IS_OTHER and sys.argv[:1] == ["-m"]:  # so while the module to run is being located
    sys.excepthook = _explain

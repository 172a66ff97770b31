"""Says what to type where a command's interpreter lacks a package, instead of a traceback.

Each package with commands imports this first; it acts only under `python -m`, in a checkout, with
another interpreter than that of the environment that `make setup` makes.

It also warns of a folder, such as an app's own `training`, that hides one of ours.
"""

import importlib.util
import shlex
import sys
import warnings
from pathlib import Path
from types import TracebackType

_VENV = Path(__file__).parents[1] / ".venv"
_ROOMS = ("stacks", "sizing", "review", "training", "operate", "rehearsal", "embedded_aws")


def warn_of_hidden(root: Path) -> None:
    """Warn of each room below `root` that another package of its name hides."""
    for ours in (root / name / "__init__.py" for name in _ROOMS):
        spec = importlib.util.find_spec(ours.parent.name) if ours.is_file() else None
        if spec and spec.origin and Path(spec.origin).resolve() != ours.resolve():
            warnings.warn(
                f"{Path(spec.origin).parent} hides {ours.parent} of the training stack; rename the "
                "former, or `import` and `python -m` find that one",
                stacklevel=2,
            )


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ImportError):
        return sys.__excepthook__(kind, error, trace)
    activate = f"source {shlex.quote(str(_VENV / 'bin/activate'))}"
    why = f"{error}: {sys.executable} is not this project's environment"
    what = f"run `make setup` once in {_VENV.parent}, then type `{activate}`, and the command again"
    return print(f"error: {why}; {what}", file=sys.stderr)


warn_of_hidden(_VENV.parent)
_IS_OTHER = _VENV.with_name("Makefile").is_file() and _VENV.resolve() != Path(sys.prefix).resolve()
if _IS_OTHER and sys.argv[:1] == ["-m"]:  # so while the module to run is being located
    sys.excepthook = _explain

"""The command line: `python -m training COMMAND`.

Exit codes: 0 finished, 75 interrupted and saved, 76 lost the lease, 2 the user's mistake, 1 failed,
74 the store failed, 3 no manifest came in time. Heavy imports wait until a command needs them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from training.durable import Store, attended, configure_logging, exit_code_of, open_store
from training.registry import check_recipe

_EXIT_CODES = """exit codes: 0 finished · 75 interrupted and saved · 76 lost the lease to another
writer · 2 a mistake in what was asked for · 1 failed · 74 the store failed · 3 (data sync)
no manifest came in time · 130 stopped by Ctrl-C"""

# Command -> the file of this folder whose add_<command> adds its options, and its help text.
_COMMANDS = {
    "run": ("run", "train to the end, or resume where a run is"),
    "data": ("data", "make, check, upload and sync datasets"),
    "measure": ("measure", "what each stage needs, without a GPU"),
    "describe": ("measure", "what a workload is made of, as JSON"),
    "count": ("measure", "what a step of any model needs, without a GPU or a workload"),
    "fail": ("run", "mark a run failed, whoever holds it"),
    "reopen": ("reopen", "let a failed run continue, or resume one from a chosen checkpoint"),
    "export": ("weights", "weights of a run or checkpoint, as a safetensors file"),
    "evaluate": ("weights", "metrics of a run's weights on a split"),
    "predict": ("weights", "what a run's weights predict for each sample"),
    "report": ("report", "a run on one page: curves, attempts, what was lost"),
    "tensorboard": ("report", "a run's metrics as TensorBoard event files"),
    "sweep": ("sweep", "runs over a grid of overrides, a few at a time"),
    "check": ("proof", "does a workload of your own resume exactly?"),
    "sagemaker": ("sagemaker", "train as the container of a SageMaker training job"),
    "torture": ("proof", "kill a small run at random moments and compare"),
}

# They train, or prepare it, and outlast trouble from their first call on; so does `data sync`.
_UNATTENDED = {"run", "fail", "sweep", "sagemaker", "check", "torture"}


def main(
    arguments: Sequence[str] | None = None, open_store: Callable[[str], Store] = open_store
) -> int:
    """Run one command; return the exit code. `run` keeps its run in what `open_store` returns."""
    given = list(sys.argv[1:] if arguments is None else arguments)

    def act() -> int:
        options = _parser(given[0] if given else "").parse_args(given)
        options.arguments, options.open_store = given, open_store
        configure_logging()
        check_recipe(**{name: vars(options).get(name) for name in ("workload", "recipe")})
        is_unattended = given[0] in _UNATTENDED or given[:2] == ["data", "sync"]
        with attended(not is_unattended):
            return int(options.act(options))

    return exit_code_of(act)


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser of all commands, with options only for the chosen one."""
    parser = argparse.ArgumentParser(
        prog="python -m training",
        description="Train a workload so that losing the machine loses nothing but time.",
        epilog=_EXIT_CODES,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        epilog = _EXIT_CODES if name == "run" else None
        command = commands.add_parser(name, help=text, epilog=epilog)
        if name == chosen:
            add: Callable[[argparse.ArgumentParser], None] = getattr(
                import_module(f"training.cli.{module}"), f"add_{name}"
            )
            add(command)
    return parser

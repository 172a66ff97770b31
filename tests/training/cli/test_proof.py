"""`check` and `torture` where training/proof is missing, as in the bundle of an instance."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import training
from contract.errors import UserError
from training.cli.proof import add_check, add_torture


@pytest.mark.parametrize(
    ("add", "arguments"), [(add_check, ["trajectory"]), (add_torture, ["--kills=1"])]
)
def test_fails_in_one_sentence_where_the_bundle_lacks_the_proof(
    add: Callable[[argparse.ArgumentParser], None],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in [name for name in sys.modules if f"{name}.".startswith("training.proof.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(training, "__path__", [str(tmp_path)])
    parser = argparse.ArgumentParser()
    add(parser)
    options = parser.parse_args(arguments)
    with pytest.raises(UserError, match=r"not part of the bundle .* run it from a checkout"):
        options.act(options)

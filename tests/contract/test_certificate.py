"""A certificate counts for the code and the program that it names, and for nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from contract.certificate import Certificate, certified
from contract.program import Program
from contract.source import CERTIFICATE, find_files, source_sha256

PROGRAM = Program(command="python train.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("pass\n")
    return tmp_path


def certificate(source: Path) -> Certificate:
    return Certificate(
        is_good=True,
        summary="at most 9 s",
        rows={"bits": "equal in 1 file"},
        code_sha256=source_sha256(source),
        program={"command": "python train.py", "quiet_seconds": 10.0, "channels": ["training"]},
        certified_on="2026-11-29",
        version="0.1.0 (abc)",
    )


def test_it_travels_with_the_code_that_it_names_and_is_no_part_of_it(source: Path) -> None:
    before = source_sha256(source)
    found = certificate(source)
    found.write(source)
    assert Certificate.read(source) == found
    assert source_sha256(source) == before and Path(CERTIFICATE) in find_files(source)
    text = "certified on 2026-11-29 with 0.1.0 (abc): at most 9 s"
    assert certified(source, PROGRAM) == {"is": text, "bits": "equal in 1 file"}
    replace(found, is_good=False).write(source)
    assert certified(source, PROGRAM)["is"].startswith("tried, and not certified, on 2026-11-29")


def test_another_command_or_quiet_time_is_named(source: Path) -> None:
    certificate(source).write(source)
    other = replace(PROGRAM, command="python train.py --epochs 90", quiet_seconds=5.0)
    assert "(with another command, quiet seconds): " in certified(source, other)["is"]
    assert "another" not in certified(source, replace(PROGRAM, interpreter="python3.12"))["is"]


def test_it_is_void_once_the_code_has_changed(source: Path) -> None:
    certificate(source).write(source)
    (source / "model.py").write_text("pass\n")
    (found,) = certified(source, PROGRAM).values()
    assert found.startswith("the code has changed since its certificate of 2026-11-29; `python -m")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 2}', '{"format": 1, "a": 2}'])
def test_without_a_readable_one_nothing_is_certified(source: Path, content: str | None) -> None:
    if content is not None:
        (source / CERTIFICATE).write_text(content)
    (found,) = certified(source, PROGRAM).values()
    assert found.startswith("no certificate: ") and "check --program 'python train.py'" in found


def test_its_size_is_bounded(source: Path) -> None:
    names = {f"{number}": "x" * 10_000 for number in range(9)}
    replace(certificate(source), rows=names, summary="y" * 10_000).write(source)
    assert (source / CERTIFICATE).stat().st_size < 10_000

"""A deployed function's process serves event after event, tells its errors, and is replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rehearsal.aws.event_bus import FunctionProcess

CODE = """
import os, time
count = 0
def handler(event, context):
    global count
    count += 1
    print("a line for the log")
    if event.get("sleeps"):
        time.sleep(60)
    return {"count": count, "half": event["number"] / event["by"], "stage": os.environ["STAGE"]}
"""


@contextmanager
def function(folder: Path, code: str) -> Iterator[FunctionProcess]:
    code_folder = folder / "guard"
    code_folder.mkdir()
    (code_folder / "index.py").write_text(code)
    process = FunctionProcess(
        handler="index.handler", variables={"STAGE": "test"}, folder=code_folder
    )
    try:
        yield process
    finally:
        process.end()


def test_one_process_answers_one_event_after_another_and_an_error_does_not_end_it(
    tmp_path: Path,
) -> None:
    with function(tmp_path, CODE) as process:
        answer, error = process.invoke({"number": 3, "by": 2}, 10)
        assert (answer, error) == ({"count": 1, "half": 1.5, "stage": "test"}, None)
        answer, error = process.invoke({"number": 3, "by": 0}, 10)
        assert answer is None
        assert error is not None
        assert error.endswith("ZeroDivisionError: division by zero")
        answer, _ = process.invoke({"number": 4, "by": 1}, 10)
        assert answer is not None
        assert answer["count"] == 3
        assert process.serves("index.handler", {"STAGE": "test"})
        assert not process.serves("index.handler", {"STAGE": "another"})
    assert (tmp_path / "guard.log").read_text() == "a line for the log\n" * 3


def test_a_timeout_ends_it(tmp_path: Path) -> None:
    with function(tmp_path, CODE) as process:
        assert process.invoke({"sleeps": True}, 1) == (None, "Task timed out after 1 seconds")
        assert not process.serves("index.handler", {"STAGE": "test"})


def test_code_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    with function(tmp_path, "import nothing_of_the_kind") as process:
        answer, error = process.invoke({}, 10)
        assert answer is None
        assert error is not None
        assert error.endswith("No module named 'nothing_of_the_kind'")
        assert not process.serves("index.handler", {"STAGE": "test"})

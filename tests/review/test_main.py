"""`python -m review` on real commits, with the real CLI; the long ones are slow."""

import json
from pathlib import Path

import pytest

from review.__main__ import main
from tests.review.conftest import REPOSITORY, git


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The last commit of this repository, with its environment."""
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--shared", str(REPOSITORY), str(folder))
    git(folder, "checkout", "--quiet", "-B", "main")
    for name in (".venv", "node_modules"):
        (folder / name).symlink_to((REPOSITORY / name).resolve())
    return folder


def commit(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    git(folder, "commit", "--quiet", "--all", "--message", f"{old} becomes {new}")


def test_fails_for_a_base_that_is_no_commit_before_anything_is_synthesized(
    clone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("review.__main__.synthesize")
    assert main(["no-such-branch"], clone) == 2
    error = capsys.readouterr().err
    assert "base 'no-such-branch' is not a commit of this repository" in error
    assert "Traceback" not in error


def test_fails_for_an_output_that_cannot_be_written_before_anything_is_synthesized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    for output, why in ((tmp_path, "Is a directory"), (tmp_path / "file/below.md", "File exists")):
        assert main(["--output", str(output)], tmp_path) == 2, "1 would mean that data are lost"
        error = capsys.readouterr().err
        assert error == f"review: --output {output} cannot be written ({why}); name another file\n"
    assert (tmp_path / "file").read_text() == "precious"


def test_fails_for_context_without_a_value(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["HEAD", "-c", "size"], clone) == 2
    assert "-c size is not NAME=VALUE" in capsys.readouterr().err


@pytest.mark.slow
def test_fails_for_a_head_that_does_not_synthesize(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(clone, "cdk.json", '"size": "g5.2xlarge"', '"size": "g5.huge"')
    output = clone / "out" / "review.md"
    assert main(["main~1", "--output", str(output)], clone) == 2
    error = capsys.readouterr().err
    assert "does not synthesize" in error
    assert "Subprocess exited" not in error
    assert "could not be reviewed" in output.read_text()
    assert "size 'g5.huge' is not in the instance catalogue" in error


@pytest.mark.slow
def test_a_commit_that_changes_the_size(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(clone, "cdk.json", '"size": "g5.2xlarge"', '"size": "g5.12xlarge"')
    assert main(["main~1"], clone) == 0
    comment = capsys.readouterr().out
    assert "| sizes the fleet may launch | g5.2xlarge g5.4xlarge" in comment
    assert "g5.12xlarge g5.24xlarge | changed |" in comment
    assert "Ebs.Throughput` | `125` | `1907` |" in comment
    assert git(clone, "worktree", "list").count("\n") == 0


@pytest.mark.slow
def test_a_commit_that_changes_a_policy(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = '["s3:DeleteObject"]'
    commit(clone, "stacks/roles.py", old, old.replace("]", ', "s3:DeleteObjectVersion"]'))
    assert main(["main~1"], clone) == 1
    comment = capsys.readouterr().out
    (line,) = [each for each in comment.splitlines() if each.startswith("- widens ")]
    assert "+ Allow s3:DeleteObjectVersion on" in line
    assert "- narrows " not in comment
    assert main(["main~1", "--accept", "permissions"], clone) == 0


@pytest.mark.slow
def test_a_commit_that_would_replace_a_bucket(
    clone: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    commit(
        clone,
        "stacks/dataset_stack.py",
        "            encryption=encryption,",
        "            encryption=encryption,\n"
        '            bucket_name=f"kept-{construct_id.lower()}",',
    )
    output = tmp_path / "comment.md"
    assert main(["main~1", "--json", "--output", str(output)], clone) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["exit_code"] == 1
    assert {each["path"] for each in facts["effects"] if each["kind"] == "loss"} == {
        "DatasetBucket",
        "RunBucket",
    }
    # The CLI calls the same resources replaced, and says so in the diff below.
    assert "BucketName (requires replacement)" in output.read_text()

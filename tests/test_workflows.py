"""The workflow files (`make check` lints them): pinned, least permissions; one comment, updated."""

import json
import os
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedded_aws.images import PYTORCH_LINES
from review.comment import MARKER
from review.protections import PROTECTIONS

REPOSITORY = Path(__file__).parent.parent
FILES = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
WRITES = {
    ("review", "review", "id-token"),
    ("review", "comment", "pull-requests"),
    ("prices", "prices", "contents"),
    ("prices", "prices", "pull-requests"),
    ("upgrades", "propose", "contents"),
    ("upgrades", "propose", "pull-requests"),
}


def workflow(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / ".github" / "workflows" / f"{name}.yml").read_text())


def step(name: str, job: str, index: int) -> Any:
    return workflow(name)["jobs"][job]["steps"][index]


def review_step() -> Any:
    (found,) = [
        each for each in workflow("review")["jobs"]["review"]["steps"] if each.get("id") == "review"
    ]
    return found


def test_training_is_tried_with_the_torch_of_every_image_that_is_promised() -> None:
    job = workflow("ci")["jobs"]["other-torch"]
    tried = {each["torch"].rpartition(".")[0] for each in job["strategy"]["matrix"]["include"]}
    lines = {line for line, _ in PYTORCH_LINES}
    # 2.15 is newer than the lock's, and no image has it yet.
    assert tried == lines - {"2.7", "2.8", "2.9"} | {"2.15"}, "see docs/dependencies.md"
    assert job["steps"][-1]["run"].startswith("make compat ")
    image = json.loads((REPOSITORY / "cdk.json").read_text())["context"]["pytorch_ami_parameter"]
    assert re.findall(r"-pytorch-([\d.]+)-", image)[0] in tried


def test_each_protection_has_a_label_that_accepts_it() -> None:
    (names,) = re.findall(r"\^accept-\((.*)\)\$", review_step()["run"])
    assert tuple(names.split("|")) == PROTECTIONS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_action_is_pinned_with_its_version_beside_it(path: Path) -> None:
    used = re.findall(r"uses: (?!\./)(.*)", path.read_text())
    assert used
    assert [
        use for use in used if not re.fullmatch(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)
    ] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_permitted_but_by_name(path: Path) -> None:
    content = workflow(path.stem)
    assert content["permissions"] == {}
    assert content["concurrency"]["group"]
    writes = {
        (path.stem, name, scope)
        for name, job in content["jobs"].items()
        for scope, level in job["permissions"].items()
        if level == "write"
    }
    assert writes == {each for each in WRITES if each[0] == path.stem}
    assert "secrets." not in path.read_text()


def test_what_may_write_comments_runs_no_code_of_the_pull_request() -> None:
    job = workflow("review")["jobs"]["comment"]
    assert [each.get("uses", "").partition("@")[0] for each in job["steps"]] == [
        "actions/download-artifact",
        "",
    ]
    # Nothing that a pull request's author writes is pasted into a script.
    assert "${{" not in job["steps"][-1]["run"]


def test_a_fork_gets_a_summary_and_no_credentials() -> None:
    jobs = workflow("review")["jobs"]
    own = "github.event.pull_request.head.repo.full_name == github.repository"
    assert own in jobs["comment"]["if"]
    (credentials,) = [
        each
        for each in jobs["review"]["steps"]
        if "configure-aws-credentials" in each.get("uses", "")
    ]
    assert own in credentials["if"]
    assert "GITHUB_STEP_SUMMARY" in review_step()["run"]


@pytest.mark.parametrize(
    ("present", "method", "target"),
    [
        ("", "POST", "repos/o/r/issues/7/comments"),
        ("42\n43\n", "PATCH", "repos/o/r/issues/comments/42"),
    ],
    ids=["first time", "again"],
)
def test_the_comment_is_written_once_and_then_updated(
    tmp_path: Path, present: str, method: str, target: str
) -> None:
    fake = tmp_path / "gh"
    fake.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        'print(json.dumps(sys.argv[1:]), file=open(os.environ["CALLS"], "a"))\n'
        'if "--paginate" in sys.argv:\n    print(os.environ["PRESENT"], end="")\n'
    )
    fake.chmod(0o755)
    script = step("review", "comment", -1)
    assert MARKER in script["run"]
    subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script["run"]],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(tmp_path / "calls"),
            "PRESENT": present,
            "COMMENTS": "repos/o/r/issues/7/comments",
            "COMMENT": "repos/o/r/issues/comments",
        },
        check=True,
    )
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) == 2
    assert calls[1] == [
        "api", "--silent", "--method", method, target, "--field", "body=@review.md",
    ]  # fmt: skip


# What the credentials' step ended with; how `review --deployed` and `review HEAD^1` end.
REVIEWS: dict[str, tuple[str, dict[str, int], list[str], str]] = {
    "without a role": ("skipped", {"HEAD^1": 1}, ["HEAD^1"], ""),
    "with a role": ("success", {"--deployed": 1}, ["--deployed"], ""),
    "a role that cannot be assumed": (
        "failure",
        {"HEAD^1": 1},
        ["HEAD^1"],
        "the role of REVIEW_ROLE_ARN could not be assumed (docs/deploy.md)",
    ),
    "a role that cannot read": (
        "success",
        {"--deployed": 2, "HEAD^1": 1},
        ["--deployed", "HEAD^1"],
        "what is deployed could not be read (docs/deploy.md)",
    ),
}


@pytest.mark.parametrize("case", REVIEWS)
def test_the_review_step_writes_summary_and_status(case: str, tmp_path: Path) -> None:
    credentials, statuses, calls, note = REVIEWS[case]
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/usr/bin/env bash\necho "$3" >> "$CALLS"\nmkdir -p out\necho comment > out/review.md\n'
        + "".join(
            f'if [[ $3 == "{name}" ]]; then exit {end}; fi\n' for name, end in statuses.items()
        )
    )
    python.chmod(0o755)
    files = {
        name: str(tmp_path / name) for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "CALLS")
    }
    subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", review_step()["run"]],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "TESTS": "failure", "CREDENTIALS": credentials, **files},
        check=True,
    )
    assert Path(files["CALLS"]).read_text().split() == calls
    summary = Path(files["GITHUB_STEP_SUMMARY"]).read_text()
    assert summary.startswith("comment\n")
    assert "**The tests: failure.**" in summary
    assert note in summary
    assert ("not with what is deployed" in summary) == bool(note)
    assert "status=1" in Path(files["GITHUB_OUTPUT"]).read_text()


def test_credentials_that_fail_do_not_fail_the_review() -> None:
    (credentials,) = [
        each
        for each in workflow("review")["jobs"]["review"]["steps"]
        if each.get("id") == "credentials"
    ]
    assert credentials["continue-on-error"] is True
    assert review_step()["env"]["CREDENTIALS"] == "${{ steps.credentials.outcome }}"


@pytest.mark.parametrize(
    ("answers", "age", "is_proposed"),
    [("diff) exit 1;; ls-remote) exit 2", 8, True), ("ls-remote) exit 2", 8, False), ("", 8, False),
     ("diff) exit 1;; ls-remote) exit 2", 40, False)],
    ids=["new prices", "the same prices", "proposed before", "a source that stopped"],
)  # fmt: skip
def test_new_prices_are_proposed_once_with_the_day_they_are_of(
    tmp_path: Path, answers: str, age: int, is_proposed: bool
) -> None:
    """The script of the workflow with all that leaves the machine replaced."""
    day = datetime.now(UTC).date() - timedelta(days=age)
    # Version 10 is the newest, and has no prices of AWS yet.
    gh = f"""case "$*" in
        *contents/catalogs\\ *) printf "%s\\n" v10 v9 v8;; *v10/aws) exit 1;; *v9/aws) ;;
        api*) echo 0123abc {day};; *) cat >> "$CALLS";; esac"""
    fakes = {
        "fake/curl": "",
        "fake/gh": gh,
        "fake/git": f'case "$1" in {answers or "nothing) "};; esac',
        ".venv/bin/python": '[ "$2" != pytest ] || { echo FAILED tests/test_a.py; exit 1; }',
    }
    for name, does in fakes.items():
        fake = tmp_path / name
        fake.parent.mkdir(parents=True, exist_ok=True)
        fake.write_text(f'#!/bin/sh\necho {fake.name} "$@" >> "$CALLS"\n{does}\n')
        fake.chmod(0o755)
    run, calls = step("prices", "prices", -1), tmp_path / "calls"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run["run"]],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path / 'fake'}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(calls),
            "RUNNER_TEMP": "temp",
            "REPOSITORY": run["env"]["REPOSITORY"],
        },
        check=False,
        capture_output=True,
        text=True,
    )
    said = calls.read_text()
    is_stopped = age > 30
    assert done.returncode == is_stopped
    assert ("v9/aws/vms.csv for 40 days" in done.stdout) == is_stopped
    imports = f"python -m sizing catalogue --import-snapshot temp/vms.csv --date {day}"
    assert (imports in said) == (bool(answers) and not is_stopped)
    assert ("gh pr create" in said, "git push" in said) == (is_proposed, is_proposed)
    assert ("FAILED tests/test_a.py" in said) == is_proposed
    if is_proposed:
        assert "skypilot-catalog/0123abc/catalogs/v9/aws/vms.csv" in said

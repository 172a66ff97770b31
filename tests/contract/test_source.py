"""A program's source folder: what of it travels, what is refused, and by which name."""

import os
import subprocess
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.source import MAX_MB, copy_source, find_files, source_sha256


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    for name in ("train.py", "nets/model.py", "requirements.txt", "__pycache__/train.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def found(source: Path) -> list[str]:
    return [path.as_posix() for path in find_files(source)]


def git(folder: Path, *words: str) -> None:
    # A test may run within a git hook.
    own = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *words], cwd=folder, env=own, check=True, capture_output=True)


def test_all_but_caches_travels_where_there_is_no_git(source: Path) -> None:
    assert found(source) == ["nets/model.py", "requirements.txt", "train.py"]


def test_what_git_ignores_stays_and_what_is_new_travels(source: Path) -> None:
    git(source, "init", "--quiet")
    (source / ".gitignore").write_text("runs/\n*.pt\n")
    (source / "runs").mkdir()
    (source / "runs/model.pt").write_text("large")
    git(source, "add", "train.py", "nets")
    (source / "nets/model.py").unlink()
    assert found(source) == [".gitignore", "requirements.txt", "train.py"]


@pytest.mark.parametrize("has_git", [False, True])
def test_an_empty_folder_travels_unless_git_ignores_it_and_is_no_change_of_the_code(
    source: Path, tmp_path: Path, has_git: bool
) -> None:
    if has_git:
        git(source, "init", "--quiet")
        (source / ".gitignore").write_text("runs/\n")
    before = source_sha256(source)
    for name in ("runs", "out/plots", "nets/cache", ".venv/lib"):
        (source / name).mkdir(parents=True)
    copy_source(source, tmp_path / "copy")
    empty = {p.relative_to(tmp_path / "copy").as_posix() for p in (tmp_path / "copy").rglob("*")}
    expected = {"out", "out/plots", "nets/cache"} | (set() if has_git else {"runs"})
    assert {name for name in empty if (source / name).is_dir()} == expected | {"nets"}
    assert source_sha256(source) == before


def test_a_repository_within_the_repository_travels_too(source: Path) -> None:
    git(source, "init", "--quiet")
    git(source / "nets", "init", "--quiet")
    (source / "nets/.gitignore").write_text("*.pt\n")
    (source / "nets/old.pt").write_text("large")
    assert "nets/model.py" in found(source)
    assert "nets/old.pt" not in found(source)


def test_fails_on_a_submodule_that_was_not_cloned(source: Path) -> None:
    # What `git clone` leaves of it: an empty folder, and a commit's name in the index.
    git(source, "init", "--quiet")
    commit = f"160000,{'1' * 40},third_party/nets"
    git(source, "update-index", "--add", "--cacheinfo", commit)
    (source / "third_party/nets").mkdir(parents=True)
    with pytest.raises(UserError, match="submodule third_party/nets, which is empty here"):
        find_files(source)


@pytest.mark.parametrize(
    "name",
    [
        *(".env", "deploy/.env.prod", "id_rsa", "tls/server.key", "aws.pem", ".aws/config"),
        *("credentials.json", ".netrc", "kaggle.json", "service-account-7.json"),
    ],
)
def test_fails_on_a_secret_and_names_it(source: Path, name: str) -> None:
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).write_text("secret")
    with pytest.raises(ValueError, match=f"source has {name}, which by name is a secret and"):
        find_files(source)
    git(source, "init", "--quiet")
    (source / ".gitignore").write_text(name)
    assert name not in found(source)


def test_examples_of_secrets_and_public_keys_travel(source: Path) -> None:
    for name in (".env.example", "id_rsa.pub", "keys.py", "environment.yml"):
        (source / name).write_text("")
    assert {".env.example", "id_rsa.pub", "keys.py", "environment.yml"} <= set(found(source))


def test_fails_on_a_link_that_leads_out_and_follows_one_that_stays(source: Path) -> None:
    (source / "again.py").symlink_to("nets/model.py")
    assert "again.py" in found(source)
    (source / "data.csv").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"source has data\.csv, a symbolic link to /etc/hostname"):
        find_files(source)
    (source / "data.csv").unlink()
    (source / "linked").symlink_to("nets")
    assert "linked/model.py" in found(source) and "linked" not in found(source)
    (source / "here").symlink_to(".")
    with pytest.raises(ValueError, match="source has here, which is neither a file nor a link to"):
        find_files(source)


def test_fails_on_a_name_that_is_no_text(source: Path) -> None:
    Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9.py")).write_text("1")
    with pytest.raises(UserError, match=r"source has b'caf\\xe9.py', whose name is not UTF-8"):
        find_files(source)


def test_fails_on_checkpoints_left_lying_about_and_names_the_largest(source: Path) -> None:
    with (source / "last.pt").open("wb") as file:
        file.truncate((MAX_MB + 1) * 1_000_000)
    with pytest.raises(ValueError, match=r"51 MB .*may have 50 MB.* last\.pt \(51\.0 MB\)"):
        find_files(source)


def test_all_travels_of_a_folder_that_its_repository_ignores(source: Path) -> None:
    # As the bundle on a machine of `make demo`, which lies in the repository's out/.
    git(source.parent, "init", "--quiet")
    (source.parent / ".gitignore").write_text("mine/\n")
    assert found(source) == ["nets/model.py", "requirements.txt", "train.py"]
    (source / "out/plots").mkdir(parents=True)
    copy_source(source, source.parent / "copy")
    assert (source.parent / "copy/out/plots").is_dir()


def test_fails_where_git_ignores_all(source: Path) -> None:
    git(source, "init", "--quiet")
    (source / ".gitignore").write_text("*\n")
    with pytest.raises(ValueError, match="has no file that git does not ignore"):
        find_files(source)

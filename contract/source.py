"""A user's source folder: which of its files travel, namely those that git does not ignore.

It refuses secrets (by file name), links to files that would stay behind, and too many bytes.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from contract.errors import UserError

# What `check --program` has found of the code, which is no part of it (contract/certificate.py).
CERTIFICATE = "program.certificate.json"
# Each boot fetches it, and each deploy of a change uploads it.
MAX_MB = 50
# How Python represents bytes of a name that are not UTF-8; no key or archive may have such a name.
NOT_TEXT = re.compile("[\udc80-\udcff]")
# Files that tools recreate where they are missing; git, where there is one, ignores them.
_CACHES = re.compile(
    r"__pycache__|\.git|\.venv|venv|node_modules|\.ipynb_checkpoints|\.[a-z]+_cache|.*\.pyc|\.DS_Store"
)
_SECRETS = re.compile(
    r"\.env(\..+)?|.*\.(pem|key|p12|pfx|jks|keystore)|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|"
    r"(aws_)?credentials(\.(json|csv|ini|ya?ml))?|\.netrc|\.pypirc|\.npmrc|\.git-credentials|"
    r"secrets?\.(json|ya?ml|toml|env|txt)|kaggle\.json|service[-_]account.*\.json|"
    r"client_secret.*\.json|\.pgpass|\.htpasswd",
    re.IGNORECASE,
)
_NO_SECRETS = re.compile(r".*(example|sample|template|dist)(\.[a-z]+)?|.*\.pub", re.IGNORECASE)


def find_files(source: Path) -> list[Path]:
    """Return the files below the folder that travel; UserError for those that must not."""
    paths = sorted(_followed(source, [*_listed(source)]))
    if not paths:
        raise UserError(
            f"source is {str(source)!r}, which has no file that git does not ignore; specify the "
            "folder of your code"
        )
    for path in paths:
        if NOT_TEXT.search(str(path)):
            raise UserError(f"source has {os.fsencode(path)!r}, whose name is not UTF-8; rename it")
    secrets = [str(path) for path in paths if _is_secret(path)]
    if secrets:
        verb = "is a" if len(secrets) == 1 else "are"
        raise UserError(
            f"source has {', '.join(secrets[:3])}, which by name {verb} secret and "
            "would be stored in S3 with the code; move it out of the folder or add it to "
            ".gitignore, and let your code read secrets from AWS Secrets Manager"
        )
    for path in paths:
        _check_link(source, path)
    sizes = {path: (source / path).stat().st_size for path in paths}
    total = sum(sizes.values()) / 1e6
    if total > MAX_MB:
        largest = sorted(paths, key=lambda path: -sizes[path])[:3]
        named = ", ".join(f"{path} ({sizes[path] / 1e6:.1f} MB)" for path in largest)
        raise UserError(
            f"source has {total:.0f} MB in {len(paths)} files and may have {MAX_MB} MB; the "
            f"largest are {named}: add data and checkpoints to .gitignore, and upload data with "
            "`python -m training data upload`"
        )
    return paths


def copy_source(source: Path, target: Path) -> list[Path]:
    """Replace the folder `target` by a copy of the files that travel; return their paths."""
    paths = find_files(source)
    shutil.rmtree(target, ignore_errors=True)
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target / path)
    for folder in empty_folders(source, paths):
        (target / folder).mkdir(parents=True, exist_ok=True)
    return paths


def empty_folders(source: Path, paths: Sequence[Path]) -> list[Path]:
    """Return the folders without files that lie next to `paths` and that git does not ignore.

    A script may write into them. They are no part of the source's checksum.
    """
    found, is_ignored = list[Path](), _is_ignored(source)
    for parent in sorted({parent for path in paths for parent in path.parents}):
        for name in sorted(next(os.walk(source / parent), ("", [], []))[1]):
            top = source / parent / name
            if _CACHES.fullmatch(name) or any(files for _, _, files in os.walk(top)):
                continue
            if not top.is_symlink() and (is_ignored or not _is_ignored(top)):
                found += [Path(each) for each, names, _ in os.walk(top) if not names]
    return [folder.relative_to(source) for folder in found]


def _is_secret(path: Path) -> bool:
    is_key_folder = any(part in (".aws", ".ssh", ".gnupg") for part in path.parts)
    name = path.name
    return is_key_folder or bool(_SECRETS.fullmatch(name) and not _NO_SECRETS.fullmatch(name))


def _check_link(source: Path, path: Path) -> None:
    """Refuse a link whose target would be missing, or is not a file."""
    whole = source / path
    if not whole.resolve().is_relative_to(source.resolve()):
        raise UserError(
            f"source has {path}, a symbolic link to {whole.resolve()} outside it, which no "
            "machine has; copy the file into the folder, or remove the link"
        )
    if not whole.is_file():
        raise UserError(
            f"source has {path}, which is neither a file nor a link to one; remove it, or add it "
            "to .gitignore"
        )


def _listed(source: Path) -> Iterator[Path]:
    """Yield the files by relative path: in a git repository those that git does not ignore."""
    done = _git(source, ["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    message = os.fsdecode(done.stderr).strip() if done else "not a git repository"
    if (done is None or done.returncode) and "not a git repository" not in message:
        raise UserError(f"source is {str(source)!r}, whose files git does not list: {message}")
    # Another repository may ignore this folder, as a build folder, so it lists none of its files.
    if done is None or done.returncode or (not done.stdout and _is_ignored(source)):
        yield from _walked(source)
        return
    for raw in filter(None, set(done.stdout.split(b"\0"))):
        path = Path(os.fsdecode(raw))
        if any(_CACHES.fullmatch(part) for part in path.parts):
            continue
        whole = source / path
        # A repository within the repository is listed as a folder; a submodule that was not cloned
        # is an empty one.
        if whole.is_dir() and not whole.is_symlink():
            if not (whole / ".git").exists():
                raise UserError(
                    f"source has the submodule {path}, which is empty here; run "
                    f"`git submodule update --init` in {str(source)!r}"
                )
            yield from (path / each for each in _listed(whole))
        # git lists a deleted file until the deletion is committed.
        elif whole.is_symlink() or whole.exists():
            yield path


def _followed(source: Path, paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files; in place of a link to a folder of the source, those in that folder."""
    root = source.resolve()
    for path in paths:
        whole, found = source / path, list[Path]()
        if whole.is_symlink() and whole.is_dir() and (to := whole.resolve()).is_relative_to(root):
            to = to.relative_to(root)
            inner = (one for one in paths if one.is_relative_to(to) and not path.is_relative_to(to))
            found = [path / one.relative_to(to) for one in inner]
        yield from found or [path]


def _is_ignored(source: Path) -> bool:
    """Return whether the repository around the folder ignores the folder itself."""
    folder = source.resolve()
    # Asked in its parent, because the folder's own .gitignore is only about its contents.
    done = _git(folder.parent, ["check-ignore", "--quiet", folder.name])
    return done is not None and done.returncode == 0


def _git(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes] | None:
    """Run git in the folder; None if this machine has none."""
    # A git hook, for example, would pass on the settings of another repository.
    clean = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    clean["LC_ALL"] = "C"
    command = ["git", *arguments]
    try:
        return subprocess.run(command, cwd=folder, env=clean, capture_output=True, check=False)
    except FileNotFoundError:
        return None


def _walked(source: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(source):
        names[:] = [name for name in names if not _CACHES.fullmatch(name)]
        links = [name for name in names if Path(folder, name).is_symlink()]
        for name in [*files, *links]:
            if not _CACHES.fullmatch(name):
                yield Path(folder, name).relative_to(source)


def source_sha256(source: Path) -> str:
    """Return a checksum of the names, contents and executable bits of the files that travel."""
    digest = hashlib.sha256()
    for path in find_files(source):
        if path == Path(CERTIFICATE):
            continue
        whole = source / path
        content = hashlib.sha256(whole.read_bytes()).hexdigest()
        digest.update(f"{path.as_posix()} {os.access(whole, os.X_OK)} {content}\n".encode())
    return digest.hexdigest()

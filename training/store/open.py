"""Open a store by URI: a prefix of an S3 bucket, or a folder."""

from pathlib import Path

from training.errors import UserError
from training.store.folder import FolderStore
from training.store.protocol import Store
from training.store.s3 import S3Store


def open_store(uri: str) -> Store:
    """Open `s3://bucket/prefix` or a folder, which need not exist yet."""
    if uri.startswith("s3://"):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise UserError(f"the URI {uri!r} names no bucket; write s3://bucket/prefix")
        return S3Store(bucket, prefix.strip("/"))
    if "://" in uri or not uri:
        raise UserError(
            f"the URI {uri!r} is neither s3://bucket/prefix nor a folder; give one of them"
        )
    return FolderStore(Path(uri))

"""Clients of S3 without a command of their own, fetching all files of a list into a folder.

`python benchmarks/sync_client.py obstore|crt LIST FOLDER` in an environment that has the client;
LIST has a key in each line.
"""

import asyncio
import os
import sys
from pathlib import Path

_BUCKET = "keep"
_AT_ONCE = 16


def crt(keys: list[str], out: Path) -> None:
    """boto3's transfers by the AWS Common Runtime, as `aws s3` uses it where it is installed."""
    import botocore.session
    from s3transfer.crt import (  # type: ignore[import-untyped]
        BotocoreCRTRequestSerializer,
        CRTTransferManager,
        create_s3_crt_client,
    )

    session = botocore.session.Session()
    settings = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
    serializer = BotocoreCRTRequestSerializer(session, settings)
    client = create_s3_crt_client("us-east-1", use_ssl=False)
    with CRTTransferManager(client, serializer) as manager:
        futures = [manager.download(_BUCKET, key, str(out / Path(key).name)) for key in keys]
        for future in futures:
            future.result()


def obstore(keys: list[str], out: Path) -> None:
    """The Rust client object_store from Python, a stream for each file."""
    import obstore as client  # type: ignore[import-not-found]
    from obstore.store import S3Store  # type: ignore[import-not-found]

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    store = S3Store(_BUCKET, endpoint=endpoint, client_options={"allow_http": True})
    gate = asyncio.Semaphore(_AT_ONCE)

    async def fetch(key: str) -> None:
        async with gate:
            answer = await client.get_async(store, key)
            with (out / Path(key).name).open("wb") as file:
                async for chunk in answer.stream(min_chunk_size=2**20):
                    file.write(chunk)

    async def fetch_all() -> None:
        await asyncio.gather(*map(fetch, keys))

    asyncio.run(fetch_all())


if __name__ == "__main__":
    wanted = Path(sys.argv[2]).read_text().split()
    {"crt": crt, "obstore": obstore}[sys.argv[1]](wanted, Path(sys.argv[3]))

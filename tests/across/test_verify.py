"""`runs verify` reads what S3 remembers of a run: each head, and when what it named was deleted."""

import json

import boto3
import pytest

from contract.keys import HEAD, checkpoint_prefix
from contract.verify import broken_rules, verify
from embedded_aws.front import Front
from tests.training.serving import new_bucket, served
from training.durable import Events, History, Retention, open_store
from training.durable.record.head import CheckpointEntry, checkpoint_name
from training.durable.record.lease import Lease, acquire
from training.durable.store.protocol import Store
from training.durable.store.transfer import FileEntry


def attempt(store: Store, writer: str) -> tuple[Lease, Events]:
    lease = acquire(store, "run-1", writer, 0.1, lambda seconds: False, lambda holder: None)
    assert isinstance(lease, Lease)
    events = Events(store, writer)
    events.emit("take-over", generation=lease.head.generation)
    return lease, events


def commit(store: Store, lease: Lease, events: Events, step: int) -> str:
    name = checkpoint_name(step, lease.head.generation)
    store.put(f"{checkpoint_prefix(name)}state.json", b"{}")
    files = (FileEntry(name="state.json", bytes=2, sha256="0" * 64),)
    where = {"stage": "head", "epoch": 0, "kind": "periodic"}
    entry = CheckpointEntry(name=name, step=step, files=files, **where)
    lease.publish(entry, retention=Retention(newest=1))
    events.emit("committed", step=step)
    lease.delete_unkept()
    return name


def test_a_buckets_past_is_sound_until_somebody_breaks_a_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(Front({})) as endpoint:
        uri, client = f"{new_bucket(endpoint, monkeypatch)}/runs/run-1", boto3.client("s3")
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        status = {"Status": "Enabled"}
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=status)
        store = open_store(uri)
        lease, events = attempt(store, "i-1")
        first = commit(store, lease, events, 3)
        commit(store, lease, events, 6)
        lease.release()
        lease, events = attempt(store, "i-2")
        newest = commit(store, lease, events, 9)
        lease.finish("0" * 64)

        def broken() -> list[str]:
            return broken_rules(History.trace(store).with_past(client, bucket, prefix))

        trace = History.trace(store).with_past(client, bucket, prefix)
        assert [head["generation"] for _, head in trace.heads] == [1, 1, 1, 1, 2, 2, 2]
        assert all("run_id" not in head for _, head in trace.heads), "what no rule reads"
        assert first in trace.deleted
        assert all(isinstance(each["stored"], float) for each in trace.events)
        assert [each.rule for each in verify(trace) if each.broken] == broken() == []

        client.delete_object(Bucket=bucket, Key=f"{prefix}/{checkpoint_prefix(newest)}state.json")
        found = client.get_object(Bucket=bucket, Key=f"{prefix}/{HEAD}")["Body"].read()
        stale = json.loads(found) | {"generation": 1, "state": "running"}
        client.put_object(Bucket=bucket, Key=f"{prefix}/{HEAD}", Body=json.dumps(stale).encode())
        assert {each.partition(":")[0] for each in broken()} == {
            "generations-in-order",
            "deleted-after-forgotten",
            "nothing-after-the-end",
        }

"""A model of a service is read once a process, whoever asks for it."""

import pytest
from botocore.loaders import JSONFileLoader

from embedded_aws import EmbeddedAws


def test_a_second_account_reads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        with EmbeddedAws() as aws:
            aws.client("ec2").describe_instances()

    ask()
    read: list[str] = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda _, path: read.append(path))
    ask()
    assert read == []

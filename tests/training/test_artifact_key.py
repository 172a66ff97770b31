"""Equal facts name one artifact, other facts another."""

from training.artifact_key import artifact_key


def test_the_order_of_facts_does_not_matter_and_their_values_do() -> None:
    key = artifact_key({"weights": "random 0", "num_shards": 8})
    assert key == artifact_key({"num_shards": 8, "weights": "random 0"})
    assert len(key) == 32
    assert key != artifact_key({"weights": "random 1", "num_shards": 8})
    assert key != artifact_key({"weights": "random 0", "num_shards": "8"})

"""Equal facts name one artifact, other facts another."""

from training.artifact_key import key_of


def test_the_order_of_facts_does_not_matter_and_their_values_do() -> None:
    key = key_of({"weights": "random 0", "num_shards": 8})
    assert key == key_of({"num_shards": 8, "weights": "random 0"})
    assert len(key) == 32
    assert key != key_of({"weights": "random 1", "num_shards": 8})
    assert key != key_of({"weights": "random 0", "num_shards": "8"})

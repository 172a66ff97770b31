"""What the Guard counted goes into the receipt; what cannot be read is left out."""

import json
from pathlib import Path

from contract.keys import GUARD
from training.report.spending import read_spending
from training.store.open import open_store


def test_dollars_and_hours_by_market_and_the_moves_between_them(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert read_spending(store) is None
    billed = {"spot": {"hours": 2.0, "usd": 1.0}, "on-demand": {"hours": 0.5, "usd": 0.51}}
    document = {"format": 2, "billed": billed, "market": {"moves": 2}}
    (tmp_path / GUARD).write_text(json.dumps(document))
    assert read_spending(store) == {"usd": 1.51, "by_market": billed, "moves": 2}


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for text in ("{", '{"format": 1, "attempts": {}}', "[]", '{"billed": {"spot": 3}}'):
        (tmp_path / GUARD).write_text(text)
        assert read_spending(store) is None

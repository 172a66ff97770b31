"""The docstring of save/ names the stations of a save in order: each is where it says."""

import re
from pkgutil import resolve_name

from training.durable import save


def test_each_station_of_a_save_is_where_the_docstring_says() -> None:
    stations = re.findall(r"\b(?:tensors|snapshots|publish)\.[\w.]*\w", str(save.__doc__))
    assert len(stations) > 10
    for station in stations:
        assert resolve_name(f"{save.__name__}.{station}").__doc__, station

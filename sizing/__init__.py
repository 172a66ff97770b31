"""What is known before a run starts: the instance catalogue and the models built on it.

Each room's docstring says what it is for, what it promises and which rooms it may use; `make check`
enforces that. On the ground floor stands `figures`, a number with its basis. `footprints.json`, written
by `python -m training measure`, and `calibration.json`, written by `review`, keep their place here.
"""

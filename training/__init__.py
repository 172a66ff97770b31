"""The training engine, and the workloads that it trains.

This ground floor holds what a workload is made of: `workload` (the base classes), `settings`,
`stage_data`, `randomness`, `artifact_key`, `rungs`, `errors`, and `registry`. A workload
below workloads/ imports the ground floor alone, `growth` its library `expansion` as well. Each
room's docstring says what it is for, what it promises and which rooms it may use; `make check`
holds them to it.
"""

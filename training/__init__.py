"""The training engine, and the workloads that it trains.

This ground floor holds what a workload is made of: `workload` (the protocol), `capabilities`,
`config`, `randomness`, `artifact_key`, `rungs`, `proxies`, `errors`, and `workloads`, the registry.
A workload (`detection/`, `growth/`, `imagenet/`, `trajectory/`) imports the ground floor alone,
`growth/` its library `expansion/` as well. Each room's docstring says what it is for, what it
promises and which rooms it may use; `make check` holds them to it.
"""

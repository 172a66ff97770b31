"""The training engine: one loop, one checkpoint store, and the workloads in folders below."""

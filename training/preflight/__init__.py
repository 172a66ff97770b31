"""Checks before an attempt starts: the workload, memory, the machine, the run's origin.

Promises that what cannot work is refused before it costs time. Uses training/engine and the
packages below it.
"""

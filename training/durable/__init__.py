"""A run that outlives its machines: its store, its record, its attempts, its saves, its reports.

Promises that a checkpoint exists only once the head names it, that exactly one writer wins, that a
notice ends the attempt in time, and that the next one goes on from the same bits. It knows neither
models nor workloads: the trainer in training/ does, and programs bring their own.
"""

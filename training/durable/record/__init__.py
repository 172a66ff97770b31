"""A run's record in its store: the head with its lease, config.json, events and metrics.

Promises that the store refuses a stale writer, and that later versions can read what was written.
Uses store. Imports no torch.
"""

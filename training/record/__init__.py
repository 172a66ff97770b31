"""What a run leaves in its store: the head with its lease, config.json, events and metrics.

Promises that a stale writer is refused by the store, and that whatever was written can be read
again by a later version. Uses training/store. Imports no torch.
"""

"""Derived data: of Prepare stages, made shard by shard, verified, reused, shared between runs; and
what torch.compile has made, kept for the run's own replacements.

Uses training/attempt, training/report and training/store.
"""

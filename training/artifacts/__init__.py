"""Derived data of Prepare stages: made shard by shard, verified, reused, shared between runs.

Uses training/attempt, training/report and training/store.
"""

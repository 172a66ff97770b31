"""Derived data of Prepare stages: made shard by shard, verified, reused, shared between runs.

Uses training/durable/attempt, training/durable/report and training/store.
"""

"""Derived data of Prepare stages: made shard by shard, verified, reused, shared between runs.

Uses training/ranks, training/report and training/store.
"""

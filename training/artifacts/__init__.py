"""Derived data of Prepare stages: made shard by shard, verified, reused, shared between runs.

Uses the door of training/durable.
"""

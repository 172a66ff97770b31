"""Tests that a workload resumes exactly: `check` and `torture`.

Left out of the bundle that instances run; nothing in the engine imports it. Uses training/engine,
training/preflight and the rooms below them.
"""

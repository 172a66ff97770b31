"""Tests that a workload or a program resumes exactly: `check` and `torture`.

A workload's attempts: `injector` has the kills of one, `attempt` runs it, `experiment` interrupts
it. A program's lives: `check.player`. `compare` compares a run with the uninterrupted one. Left out
of the bundle that instances run; nothing in the engine imports it. Uses training/engine,
training/preflight and the rooms below them.
"""

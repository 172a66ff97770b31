"""Tests that a workload or a program resumes exactly: `check` and `torture`.

One interrupter for both: `injector` has the kills of an attempt, `attempt` and `machine` run one,
`experiment` interrupts it, `compare` compares the run with the uninterrupted one. Left out of the
bundle that instances run; nothing in the engine imports it. Uses training/engine,
training/preflight and the rooms below them.
"""

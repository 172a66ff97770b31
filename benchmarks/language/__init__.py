"""`python -m benchmarks language`: the growing model's three phases beside peers of the same shape.

Each contender is a process of its own (`python -m benchmarks.language`), which makes steps when it
is told to: on a CPU all are there at once and take turns, on a GPU one after another.
"""

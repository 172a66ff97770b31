"""`python -m benchmarks gpu`: what only a GPU can say, in one table and at most eight minutes.

Each measurement is a process of its own (`python -m benchmarks.gpu NAME`), so that one that fails
or hangs costs no other. `--cpu` is a dry run of all of it with tiny sizes: it tests the program.
"""

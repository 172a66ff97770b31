"""`python -m benchmarks detection`: deformable attention and whole steps beside transformers'.

Each contender is a process of its own (`python -m benchmarks.detection`), which makes steps when it
is told to: on a CPU all are there at once and take turns, on a GPU one after another.
"""

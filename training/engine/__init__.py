"""One attempt of a run: its stages in order, the training loop, evaluation and inference.

Promises that an interrupted run ends with the weights of an uninterrupted one. Names no workload.
Uses every package except training/preflight, training/proof and training/cli.
"""

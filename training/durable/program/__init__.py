"""Programs that know nothing of this project: run in SageMaker's container contract, and mirrored.

Promises that a program finds all that it would find there, and that none of its processes outlives
the attempt. Imports no torch.
"""

"""Snapshots: a program's checkpoint folder, mirrored to the run's store as whole states.

Promises that a snapshot exists only once the head names it, that it is the folder as it was at one
moment, and that every byte is verified before the program sees it. Uses training/record and
training/store. Imports no torch.
"""

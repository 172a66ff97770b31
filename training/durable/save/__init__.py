"""Saves: tensors of ranks, or a program's folder, become a checkpoint, and a run resumes from it.

Promises that a checkpoint exists only once the head names it, that it is the state of one moment,
that every byte is verified before it is used, and that nothing is unpickled. Uses attempt,
record and store.
"""

"""Checkpoints: when to save, how a state becomes files, and how a run resumes from them.

Promises that a checkpoint exists only once the head names it, that every byte is verified before it
is used, and that nothing is unpickled. Uses training/ranks, training/interruption, training/record
and training/store.
"""

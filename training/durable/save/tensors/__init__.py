"""Saves of a trainer's tensors, from all its ranks, and reading them back."""

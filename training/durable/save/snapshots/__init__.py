"""Saves of a program's folder, which is unknown to the program, and restoring it; no torch."""

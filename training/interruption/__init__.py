"""What may end an attempt before its end: a notice, a shutdown, a hang, a lost rank.

Promises that a notice is heard while the main thread is busy, and that the process is gone in time.
Uses training/record and training/store. Imports no torch.
"""

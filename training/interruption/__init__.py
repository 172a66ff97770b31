"""What may end an attempt early: a notice, a shutdown, a hang, a lost rank.

Promises that a notice is noticed while the main thread is busy, and that the process exits in time.
Uses training/record and training/store. Imports no torch.
"""

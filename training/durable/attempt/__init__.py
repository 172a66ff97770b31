"""An attempt: its ranks, what may end it early, and what they decide together.

Promises that all ranks decide the same at every step boundary, that a notice is seen even while the
main thread is busy, and that the process exits in time. Uses report, record and store.
"""

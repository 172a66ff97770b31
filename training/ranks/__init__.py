"""The processes that train one model together, and what they decide together.

Promises that all ranks take the same way at every step boundary. Uses training/interruption,
training/report, training/record and training/store.
"""

"""The processes that train one model together, and what they decide together.

Promises that all ranks decide the same at every step boundary. Uses training/interruption,
training/report, training/record and training/store.
"""

"""The models: memory, step time, data, notice and restart, serving; each one formula in one file.

Promises that every constant is in constants.py with its source, and that a finished run's own
measurement (calibration.py) replaces it. Uses sizing/catalogue.
"""

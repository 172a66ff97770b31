"""The models: memory, step time, data, notice and restart, serving; each one formula in one file.

Promises that every constant stands in constants.py with its source, and that what a finished run
measured (calibration.py) replaces it. Uses sizing/catalogue.
"""

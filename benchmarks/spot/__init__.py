"""Policies of saving and placement compared on Spot traces: what `python -m benchmarks spot` shows.

Research: no plan depends on it. Promises every policy the same restarts and the same notices, and a
bound that none can beat. Uses sizing/.
"""

"""The commands of `python -m training`, one file per group; only they read the environment.

Uses every other package.
"""

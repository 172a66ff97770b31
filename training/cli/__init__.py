"""The commands of `python -m training`, one file per group; nothing else reads the environment.

Uses every other room.
"""

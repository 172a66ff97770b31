"""The commands of `python -m sizing`, one module each."""

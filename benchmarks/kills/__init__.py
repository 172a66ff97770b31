"""The kill table: programs whose rows `check --program`'s player plays, alone and under us."""

# The share of a store's answers that have a fault.
RATE = 0.04
# How long a folder is quiet before a snapshot; 10 by default.
QUIET_SECONDS = 0.5

"""The kill table: trainers and save habits, killed on purpose, alone and under our trainer."""

# The share of a store's answers that have a fault.
RATE = 0.04

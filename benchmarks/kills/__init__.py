"""The kill table: public trainers and plain save habits, killed on purpose, alone and under ours."""

# The share of a store's answers that have a fault.
RATE = 0.04

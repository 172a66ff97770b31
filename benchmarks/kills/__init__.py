"""The kill table: public trainers and plain save habits, killed on purpose, alone and under us."""

# Of a store's answers, this share has a fault.
RATE = 0.04

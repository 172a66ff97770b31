"""Spot or on demand, by a deadline: the decision that the Guard makes and plans replay.

Standard library only, because it runs in the Guard's Lambda. Promises that no decision puts the
deadline at risk while on-demand capacity exists. Uses no other package of sizing.
"""

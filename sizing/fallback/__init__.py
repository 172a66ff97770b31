"""Spot or on demand, by a deadline: the decision that the Guard takes and plans replay.

Plain standard library, because it runs in the Guard's Lambda. It promises that no decision puts the
deadline at risk while on-demand capacity exists, and uses no other room of sizing.
"""

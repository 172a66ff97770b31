"""The four workloads, and expansion, which grows a trained model; none imports another.

Each uses the ground floor of training/ alone, never its rooms.
"""

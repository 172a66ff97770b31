"""The four workloads, and expansion, which grows a trained model; none imports another.

Each uses only the modules directly in training/, never its subpackages.
"""

"""`python -m training check NAME`: does a workload of your own resume exactly?

First problems with its protocol, by name; then small runs of it, interrupted and compared.
"""

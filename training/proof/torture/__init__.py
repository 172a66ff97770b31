"""`python -m training torture`: small runs, killed at random moments until done, and compared.

Users can run it against a workload of their own.
"""

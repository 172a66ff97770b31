"""`python -m training torture`: small runs killed at random moments until done, and compared.

It ships with the trainer so that users can run it against a workload of their own.
"""

"""The plan of a run on one size, what speaks against it, which size to take, and what happened.

Promises that a plan adds no formula of its own to the models, and that every figure names its
basis. Uses sizing/spot, sizing/models and sizing/catalogue.
"""

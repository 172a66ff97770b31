"""The plan of a run on one size, the findings against it, the size to use, and what happened.

Promises that a plan adds no formula of its own to the models, and that every figure states its
basis. Uses sizing/spot, sizing/models and sizing/catalogue.
"""

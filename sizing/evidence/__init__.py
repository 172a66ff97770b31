"""How good the models are: our figures against published runs, and the fit to them.

Promises that misses stay in the tables. Uses sizing/models and sizing/catalogue.
"""

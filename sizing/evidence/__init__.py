"""How good the models are: published runs beside our figures, and the constants fitted to them.

Promises that misses stay in the tables. Uses sizing/models and sizing/catalogue.
"""

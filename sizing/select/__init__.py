"""Selection of a size for a phase of a model's life, from experiments to serving.

Promises a reason for each size that is ranked and each that is left out. Uses sizing/models and
sizing/catalogue.
"""

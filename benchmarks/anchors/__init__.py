"""The published models that sizing is compared with, rebuilt so that their work can be counted.

`python -m benchmarks.anchor_footprints` counts them. Uses torch and torchvision; trains nothing.
"""

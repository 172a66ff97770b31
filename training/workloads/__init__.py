"""The four workloads, and expansion, which grows a trained model; none imports another.

Others know them by name (training/registry.py) and import none of their names. They use the doors
of `training` and `training.durable`.
"""

__all__: list[str] = []

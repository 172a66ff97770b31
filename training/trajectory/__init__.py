"""Workload trajectory: which of eleven ways does the ball move? Frozen ResNet-18 + Transformer."""

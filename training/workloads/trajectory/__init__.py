"""The trajectory workload: which of eleven ways does the ball move? ResNet-18 and a Transformer."""

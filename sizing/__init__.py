"""What is known before anything runs: the instance catalogue and the models built on it."""

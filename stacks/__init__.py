"""What is provisioned: DatasetStack (kept) and TrainingStack (disposable)."""

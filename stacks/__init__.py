"""What is provisioned: DatasetStack (kept), TrainingStack (disposable), ReviewStack (optional)."""

"""What is provisioned: DatasetStack (kept), NetworkStack, one TrainingStack a run, ReviewStack."""

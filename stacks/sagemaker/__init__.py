"""Runs as SageMaker training jobs, with our container: requests, their limits, prices, a queue."""

"""What SageMaker finds in the log of our trainer; its charts have no steps, only times.

tests/training/cli/test_sagemaker.py holds these against lines that the trainer prints.
"""

METRIC_DEFINITIONS = {
    "loss": r" loss ([-+.\de]+|nan|inf) lr ",
    "learning_rate": r" lr ([-+.\de]+) ",
    "samples_per_second": r" (\d+) samples/s",
    "percent_waiting_for_data": r", (\d+)% waiting for data",
    "committed_step": r"\[checkpoint\] step (\d+), ",
}

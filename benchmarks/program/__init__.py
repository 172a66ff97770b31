"""A program's checkpoints: our mirror beside `aws s3 sync` in a loop, which people use today."""

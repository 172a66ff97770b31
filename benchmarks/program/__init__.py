"""A program's checkpoints: our mirror and `aws s3 sync` in a loop, which people use today."""

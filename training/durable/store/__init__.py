"""Where runs and datasets are kept: an S3 prefix or a folder behind one protocol.

Promises complete objects, conditional writes that exactly one writer wins, and one error class.
Only s3.py imports boto3.
"""

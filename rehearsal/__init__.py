"""The same, on a laptop: the stacks, the user data and the training code, without an AWS account.

`drill/` and `alarms/` are what is rehearsed; `machines/` and `aws/` stand in for EC2 instances and
for AWS, and know neither each other nor what is rehearsed on them; `faults` is what both can be
told to do wrong. Commands: python -m rehearsal
"""

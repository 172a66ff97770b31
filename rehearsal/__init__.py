"""The stacks, the user data and the training code on a laptop, without an AWS account.

`drill/`, `scenarios/` and `alarms/` define what is rehearsed; `machines/` and `aws/` stand in for
EC2 instances and for AWS, and know neither each other nor what is rehearsed on them; `faults`
defines how both can be made to fail. Commands: python -m rehearsal
"""

import contract.environment  # noqa: F401

"""The stacks, the user data and the training code on a laptop, without an AWS account.

`demo/`, `drills/` and `alarms/` define what is rehearsed; `machines/` stands in for EC2 instances,
the room embedded_aws/ for AWS. Commands: python -m rehearsal
"""

import contract.environment  # noqa: F401

__all__: list[str] = []

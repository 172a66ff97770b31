"""The command `runs`, on AWS, on the embedded one and on a folder. It imports no torch."""

import contract.environment  # noqa: F401

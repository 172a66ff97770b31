"""The stacks: DatasetStack (kept), NetworkStack, a TrainingStack per run, and optional ones."""

import contract.environment  # noqa: F401

"""The review of what a code change does to deployed data, to a run, to permissions and to cost.

Pure functions over two synthesized assemblies; nothing is deployed. May use sizing/ (prices) and
embedded_aws/cloudformation/ (schemas, references). Run it: python -m review main
"""

import contract.environment  # noqa: F401

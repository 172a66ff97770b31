"""The training engine and the workloads that it trains.

This ground floor holds what a workload is made of: `workload` (the base classes), `settings`,
`randomness`, `artifact_key`, `rungs`, `errors`, and `registry`. A workload in
workloads/ imports only the ground floor; `growth` also imports its library `expansion`. Each
package's docstring says what it is for, what it promises and which packages it may use; `make
check` enforces that.
"""

import contract.environment  # noqa: F401

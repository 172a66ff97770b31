"""Facts and predictions before a run starts: the instance catalogue and models built on it.

Each room's docstring says what it is for, what it promises and which rooms it may use; `make check`
enforces that. The ground floor has `figures`, a number with its basis, and `suggestion`. Two
commands write data files here: `python -m training measure` footprints.json, and
`plan --calibrate` calibration.json.
"""

import contract.environment  # noqa: F401

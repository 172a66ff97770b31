"""Drills as data: what fails, when, and how the run must end; one TOML file each, in this folder.

`scenario` is the format, `trial` rehearses one, `verdict` holds its end against what it promises,
`series` deploys once and rehearses one after the other, `many` runs of several stacks side by side.
It uses drill/, machines/, aws/ and contract/.
"""

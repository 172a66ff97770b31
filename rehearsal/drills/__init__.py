"""Drills as data: what fails, when, and how the run must end; one TOML file each, in this folder.

`drill` has the format, `drill_run` rehearses one and compares its end with what it promises,
`series` deploys once and rehearses drills one after the other, `many` rehearses runs of several
stacks side by side.
"""

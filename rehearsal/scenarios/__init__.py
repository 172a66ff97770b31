"""Drills as data: what fails, when, and how the run must end; one TOML file each, in this folder.

`scenario` is the format, `action` what happens in mid-run, `trial` rehearses one, `verdict` holds
its end against what it promises, `series` deploys once and rehearses many. It uses drill/,
machines/, aws/ and contract/.
"""

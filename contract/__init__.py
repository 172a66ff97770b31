"""Facts that infrastructure, boot, trainer, plan and rehearsal must agree on, each written once.

Grammars, formulas, file names, exit codes and variable names that more than one package needs. It
uses only the standard library of Python 3.10 (an instance's own `python3` may be that old), imports
no other package of this repository, may be imported by all of them, and is part of the bundle.
"""

"""What infrastructure, boot, trainer, plan and rehearsal must agree on, each fact written once.

Grammars, formulas, file names, exit codes and variable names that more than one package needs. It
uses the standard library only, as of Python 3.10 (what an instance's own `python3` may be), imports
no other package of this repository, may be imported by all of them, and is a part of the bundle.
"""

"""Checks the account before a deploy: what would stop the deploy or the run, and the fix.

It only reads and costs nothing. Run: python -m stacks.doctor [-c NAME=VALUE] [--json]
It is in stacks/ because it checks what the stacks will request, from the same context.
"""

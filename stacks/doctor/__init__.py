"""Checks of the account before a deploy: what would stop the deploy or the run, and the fix.

They only read and cost nothing. Run: python -m stacks.doctor [-c NAME=VALUE] [--json]
Lives in stacks/ because it checks what the stacks will request, from the same context.
"""

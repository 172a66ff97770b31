"""Looks into the account before a deploy: what would stop it, or stop the run, and what mends it.

It only reads; it changes and costs nothing. Run: python -m stacks.doctor [-c NAME=VALUE] [--json]
It lives in stacks/ because it asks what the stacks will ask for, with the same context.
"""

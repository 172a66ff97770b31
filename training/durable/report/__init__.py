"""What people look at: progress, the report page, profiles and the receipt.

Nothing here changes a run. Uses record and store.
"""

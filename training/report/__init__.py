"""What people look at: progress, the report page, profiles and the receipt.

Nothing here changes a run. Uses training/record and training/store.
"""

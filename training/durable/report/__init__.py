"""Reports for people: progress, the report page, profiles and the receipt.

Nothing here changes a run. Uses record and store.
"""

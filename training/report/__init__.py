"""What people look at: progress, the report page, TensorBoard files, profiles and the receipt.

Nothing here changes a run. Uses training/record and training/store.
"""

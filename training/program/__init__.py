"""A program that knows nothing of us, as a run: started, watched and mirrored. Imports no torch."""

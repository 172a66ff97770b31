"""The Guard: a small function that stops the fleet of a run that no longer pays."""

"""The Guard: a small function that sends a fleet to zero when nothing is gained by paying on."""

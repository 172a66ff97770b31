"""checkov on every assembly that the app can make, each finding acknowledged with its reason."""

"""The same, on a laptop: embedded AWS, machines that boot the user data, drills, receipts."""

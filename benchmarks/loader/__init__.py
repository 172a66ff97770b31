"""Images per second of our loader beside others, and beside what the cores can decode and crop."""

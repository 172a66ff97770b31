"""Images per second of our loader, of others, and of what the cores can decode and crop."""

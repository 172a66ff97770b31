"""The growing language model: dense, then experts, then larger, its function preserved."""

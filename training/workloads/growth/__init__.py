"""The growing language model: dense, then with experts, then larger, its function preserved."""

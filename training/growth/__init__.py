"""Workload growth: a language model that grows twice in one run, dense, experts, then larger."""

"""Machines that boot like EC2's: real systemd and cloud-init in systemd-nspawn (root, Linux)."""

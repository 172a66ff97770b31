"""Machines in QEMU: a kernel of their own, EC2's DMI data, NVMe controllers (root, Linux)."""

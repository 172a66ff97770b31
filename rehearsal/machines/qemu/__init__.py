"""Machines of QEMU's: their own kernel, EC2's DMI data, disks behind NVMe controllers (root, Linux)."""

"""Machines that boot an instance's user data as EC2 would, each a folder and a process tree.

They promise what the boot programs use of systemd, of disks and of the metadata service, and refuse
the rest by name. They may use no other room, and need no root.
"""

from rehearsal.machines.json_disks import JsonDisk
from rehearsal.machines.process import ProcessMachine

__all__ = ["JsonDisk", "ProcessMachine"]

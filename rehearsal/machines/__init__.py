"""Machines that boot an instance's user data as EC2 would, each a folder and a process tree.

They provide what the boot programs use of systemd, of disks and of the metadata service, and refuse
the rest by name. They use no other folder of rehearsal/ but `faults`, and need no root.
"""

from rehearsal.machines.json_disks import JsonDisk
from rehearsal.machines.process import ProcessMachine

__all__ = ["JsonDisk", "ProcessMachine"]

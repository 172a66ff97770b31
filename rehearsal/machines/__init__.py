"""Machines that boot an instance's user data as EC2 would, each a folder and a process tree.

They provide what the boot programs use of systemd, of disks and of the metadata service, and refuse
the rest by name. Process machines need no root.
"""

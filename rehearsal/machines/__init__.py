"""Machines for rehearsals: each boots an instance's user data as EC2 would."""

from rehearsal.machines.process import Disk, ProcessMachine

__all__ = ["Disk", "ProcessMachine"]

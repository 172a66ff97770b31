"""What nspawn machines need of this host: the root image, and a network with AWS in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rehearsal.machines.metadata import MetadataServer
from rehearsal.machines.nspawn.machine import NspawnMachine
from rehearsal.machines.nspawn.network import MachineNetwork
from rehearsal.machines.quirks import Quirks


@dataclass(frozen=True, kw_only=True, slots=True)
class NspawnHost:
    """Makes nspawn machines."""

    image: Path
    network: MachineNetwork
    _machines: list[NspawnMachine] = field(default_factory=list)

    def machine(self, folder: Path, metadata: MetadataServer, quirks: Quirks) -> NspawnMachine:
        """Return a machine that is not yet on."""
        machine = NspawnMachine(
            folder=folder,
            image=self.image,
            network=self.network,
            metadata=metadata,
            quirks=quirks,
        )
        self._machines.append(machine)
        return machine

    def processes(self) -> list[int]:
        """Return the ids of everything that runs in the machines."""
        return [pid for machine in self._machines for pid in machine.group.processes()]


@contextmanager
def nspawn_host(image: Path, folder: Path, application: Any, region: str) -> Iterator[NspawnHost]:
    """Serve a WSGI application to machines that know it as AWS, by its own names."""
    with MachineNetwork(folder=folder) as network:
        network.serve_aws(application, region)
        yield NspawnHost(image=image, network=network)

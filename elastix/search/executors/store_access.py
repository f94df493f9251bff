"""How the workers of an executor get at the store, on one host or on several, also later.

An index in a directory is for processes of one machine. While there is one host, each opens the
directory, which is fastest. On hosts that come later a worker asks an actor, which is started on
the first host then. With several hosts from the start a StoreServer owns the index.

Not here: what is stored, and the store's actors themselves (store.server).

Invariant: whichever nodes come or go, every worker can open the store.
"""

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ray

from elastix.errors import StoreError
from elastix.search.model_sources import StoreDirectory, StoreOpener
from elastix.store import Store
from elastix.store.owner import machine
from elastix.store.server import StoreServer

_PATIENCE_S = 60.0
_PAUSE_S = 0.1
_LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class HostDirectory(StoreDirectory):
    """A directory whose index is on one host; a process elsewhere asks an actor there.

    Elsewhere is also a container of that host which has another directory at this path.

    Attributes:
        place: as `_place` gives it there.
        actor: its name; it is there once the cluster has a second node.
    """

    place: str
    actor: str

    @property
    def is_here(self) -> bool:
        """See StoreDirectory."""
        with suppress(OSError):  # there is none here
            return self.place == _place(self.path)
        return False

    def open(self) -> Store:
        """See StoreOpener. Elsewhere it waits for the actor, which may just be starting."""
        if self.is_here:
            return super().open()
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return StoreServer(ray.get_actor(self.actor), self.path).open()
            except ValueError as error:  # there is none of that name
                if time.monotonic() > give_up_s:
                    raise StoreError(
                        f"the store in {self.path} is open on another host, and nobody there "
                        f"answered for {_PATIENCE_S:.0f} s. Nothing was stored. Is the process of "
                        "the campaign alive?"
                    ) from error
            time.sleep(_PAUSE_S)


class StoreAccess:
    """Of one executor, in the process of the campaign."""

    def __init__(self) -> None:
        self._directory: HostDirectory | None = None
        self._server: StoreServer | None = None
        self._looked_s = 0.0

    def reach(self, store: str) -> StoreOpener:
        """See Executor."""
        self._directory = self._server = None
        if several_hosts() or "://" in store:
            self._server = StoreServer.start(store)
            return self._server
        name = f"elastix store {secrets.token_hex(8)}"
        self._directory = HostDirectory(store, place=_place(store), actor=name)
        return self._directory

    def look(self) -> None:
        """Whether other hosts have come. Cheap, and to be called often."""
        now = time.monotonic()
        if self._directory is None or self._server is not None or now < self._looked_s:
            return
        self._looked_s = now + _LOOK_EVERY_S
        if sum(bool(node["Alive"]) for node in ray.nodes()) > 1:
            self._server = StoreServer.beside(self._directory.path, self._directory.actor)

    def close(self) -> None:
        """Nobody asks any more."""
        if self._server is not None:
            self._server.stop()
        self._directory = self._server = None


def several_hosts() -> bool:
    """Whether the cluster has more than one now."""
    return len({node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}) > 1


def _place(directory: str) -> str:
    """Processes with the same have the same directory and share memory."""
    info = Path(directory).stat()
    return f"{machine()} {info.st_dev}:{info.st_ino}"

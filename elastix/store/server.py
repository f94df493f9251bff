"""StoreServer: the index behind a Ray actor, for many workers on many nodes.

Workers write their own packs where all can reach them (a shared directory, an object store) and
ask the actor to commit; no tensor passes through it. The index stands on a disk local to it.

Invariant: as for a Ledger. The actor may be killed at any moment: Ray starts it anew, it adopts
what was committed, and callers ask again; every request may be repeated harmlessly.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import ray
from pyarrow.fs import FileSystem
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from elastix.errors import StoreError
from elastix.store.ledger import Ledger
from elastix.store.packs import LocalPacks, Packs, own
from elastix.store.remote import RemotePacks, locate
from elastix.store.requests import Reply, Request
from elastix.store.store import Store

_CALLS = 64
_PATIENCE_S = 60.0


@dataclass
class _Ticket:
    """Requests of one caller, waiting for a commit."""

    requests: Sequence[Request]
    replies: list[Reply] | None = None
    error: StoreError | None = None


@dataclass
class _GroupCommit:
    """Whoever comes first commits for all who wait."""

    ledger: Ledger
    waiting: list[_Ticket] = field(default_factory=list)
    door: threading.Lock = field(default_factory=threading.Lock)
    turn: threading.Lock = field(default_factory=threading.Lock)
    commits: int = 0

    def submit(self, requests: Sequence[Request]) -> list[Reply]:
        """As Ledger.submit."""
        ticket = _Ticket(requests)
        with self.door:
            self.waiting.append(ticket)
        with self.turn:
            if ticket.replies is None and ticket.error is None:
                with self.door:
                    group, self.waiting = self.waiting, []
                self._commit(group)
        if ticket.error is not None:
            raise ticket.error
        return ticket.replies or []

    def _commit(self, group: list[_Ticket]) -> None:
        self.commits += 1
        try:
            replies = iter(self.ledger.submit([r for ticket in group for r in ticket.requests]))
        except StoreError as error:
            for ticket in group:
                ticket.error = error
        else:
            for ticket in group:
                ticket.replies = [next(replies) for _ in ticket.requests]


class _Server:
    """The actor. Its methods are those of a Ledger, by name."""

    def __init__(self, path: str, filesystem: FileSystem | None, index: str | None) -> None:
        self._place = path, filesystem, index
        self._opening = threading.Lock()
        self._group: _GroupCommit | None = None

    def __repr__(self) -> str:
        return f"store {self._place[0]}"

    def _opened(self) -> _GroupCommit:
        """Opens when first asked: an error then reaches the caller, and the next call may retry."""
        with self._opening:
            if self._group is None:
                root, remote, folder = locate(*self._place)
                self._owner = own(folder, alone=True)
                packs: Packs = RemotePacks(remote, root) if remote else LocalPacks(Path(root))
                self._writer = packs.writer()
                try:
                    ledger = Ledger(folder / "index.sqlite", packs, self._writer)
                except BaseException:
                    os.close(self._owner)
                    raise
                self._group = _GroupCommit(ledger)
            return self._group

    def call(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - any method
        """A public method of the Ledger."""
        group = self._opened()
        if method == "submit":
            return group.submit(*args)
        if method.startswith("_"):
            raise StoreError(f"{method!r} is no question to a store.")
        return getattr(group.ledger, method)(*args, **options)

    def about(self) -> dict[str, int]:
        """Process id, and commits since it started."""
        return {"pid": os.getpid(), "commits": self._opened().commits}

    def close(self) -> None:
        """Seal the journal and close the index."""
        group = self._opened()
        with self._writer.lock:
            self._writer.close()
        group.ledger.close()
        os.close(self._owner)


class _Client:
    """Stands for the Ledger in a worker: every method becomes `ask(method, ...)`."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        return partial(self._ask, method)


def ask(remote: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - a method of the actor
    """Call a method of the actor; once more whenever it died meanwhile.

    Raises:
        StoreError: what the method raised, or the actor was away for a minute.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ray.get(remote.remote(*args, **options), timeout=_PATIENCE_S)
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, StoreError) else error) from None
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the store's server did not answer for {_PATIENCE_S:.0f} s: {error}. What it "
                    "acknowledged is safe; whether the last request was carried out is unknown, "
                    "and repeating it is harmless. Start StoreServer again."
                ) from error


@dataclass(frozen=True)
class StoreServer:
    """A store whose index one Ray actor owns. May be sent to workers.

    Attributes:
        handle: of the actor.
        path: where the packs are. filesystem: on which pyarrow file system; None: a directory.
    """

    handle: Any
    path: str
    filesystem: FileSystem | None = None

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str],
        *,
        filesystem: FileSystem | None = None,
        index: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> Self:
        """Start the actor, or find the one of that name.

        Args:
            path: as Store takes it; every worker must reach it.
            filesystem: as Store takes it.
            index: directory of the index, on a disk local to the actor.
            name: of the actor; None: none.

        Raises:
            Conflict: another process uses this store.
        """
        text = os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)  # noqa: PTH100
        place = os.fspath(path) if filesystem else text
        actor = ray.remote(_Server).options(
            name=name,
            get_if_exists=name is not None,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_CALLS,
            num_cpus=0,
        )
        handle = actor.remote(place, filesystem, os.fspath(index) if index else None)
        server = cls(handle, place, filesystem)
        try:
            server.about()
        except StoreError:
            if name is None:
                ray.kill(cast(Any, handle), no_restart=True)
            raise
        return server

    def open(self) -> Store:
        """The Store as this process sees it; it writes packs of its own."""
        ledger = cast(Ledger, _Client(partial(ask, self.handle.call)))
        return Store(self.path, filesystem=self.filesystem, ledger=ledger)

    def about(self) -> dict[str, int]:
        """Process id of the actor and commits since it started; waits while it restarts."""
        return dict(ask(self.handle.about))

    def stop(self) -> None:
        """Close the index and end the actor."""
        ask(self.handle.close)
        ray.kill(self.handle, no_restart=True)

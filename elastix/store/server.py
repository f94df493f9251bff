"""StoreServer: the index behind a Ray actor, for many workers on many nodes.

Workers write their own packs where all can reach them (a shared directory, an object store) and
ask the actor to commit; no tensor passes through it. The index stands on a disk local to it.

Invariant: as for a Ledger. The actor may be killed at any moment: a second one, which stood by with
everything imported, adopts what was committed, and callers ask it; every request may be repeated
harmlessly. Who holds the lock of the index is the owner: two cannot be, whatever callers believe.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import ray
from pyarrow.fs import FileSystem
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastix.errors import Conflict, StoreError
from elastix.store.ledger import Ledger
from elastix.store.local_packs import LocalPacks
from elastix.store.owner import Taken
from elastix.store.packs import Packs
from elastix.store.remote import RemotePacks, locate
from elastix.store.requests import Reply, Request
from elastix.store.store import Store

_CALLS = 64
_PATIENCE_S = 60.0
_PAUSE_S = 0.05
_ELSEWHERE_S = 0.5


@dataclass
class _Ticket:
    """Requests of one caller, waiting for a commit."""

    requests: Sequence[Request]
    replies: list[Reply] | None = None
    error: Exception | None = None


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
        except Exception as error:  # noqa: BLE001 - raised by all who wait, whatever it is
            for ticket in group:
                ticket.error = error
        else:
            for ticket in group:
                ticket.replies = [next(replies) for _ in ticket.requests]


class _StandingBy(Conflict):
    """Another process owns the index; this one would, if that one died.

    It is returned and not raised: callers may have their answer from the other actor by then, and
    Ray logs errors that nobody fetches.
    """


class _Server:
    """The actor. Its methods are those of a Ledger, by name."""

    def __init__(
        self, path: str, filesystem: FileSystem | None, index: str | None, alone: bool = True
    ) -> None:
        self._place = path, filesystem, index
        self._alone = alone
        self._opening = threading.Lock()
        self._group: _GroupCommit | None = None

    def __repr__(self) -> str:
        return f"store {self._place[0]}"

    def _opened(self) -> _GroupCommit:
        """Opens when first asked: an error then reaches the caller, and the next call may retry.

        Raises:
            _StandingBy: another process owns the index.
        """
        with self._opening:
            if self._group is None:
                root, remote, folder = locate(*self._place)
                packs: Packs = RemotePacks(remote, root) if remote else LocalPacks(Path(root))
                self._writer = packs.writer()
                try:
                    ledger = Ledger(folder / "index.sqlite", packs, self._writer, alone=self._alone)
                except Taken as error:
                    raise _StandingBy(str(error)) from error
                self._group = _GroupCommit(ledger)
            return self._group

    def call(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - any method
        """A public method of the Ledger; _StandingBy if it is not here."""
        try:
            group = self._opened()
        except _StandingBy as refusal:
            return refusal
        if method == "submit":
            return group.submit(*args)
        if method.startswith("_"):
            raise StoreError(f"{method!r} is no question to a store.")
        return getattr(group.ledger, method)(*args, **options)

    def about(self) -> dict[str, int] | _StandingBy:
        """Process id, and commits since it started; _StandingBy if the index is not here."""
        try:
            return {"pid": os.getpid(), "commits": self._opened().commits}
        except _StandingBy as refusal:
            return refusal

    def close(self) -> None:
        """Seal the journal and close the index, if it is open here."""
        with self._opening:
            if self._group is not None:
                with self._writer.lock:
                    self._writer.close()
                self._group.ledger.close()
                self._group = None


class _Client:
    """Stands for the Ledger in a worker: every method becomes `ask(method, ...)`."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        return partial(self._ask, method)


@dataclass
class _Line:
    """The way to whichever actor owns the index."""

    actors: Sequence[Any]
    at: int = 0  # who answered last

    def ask(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - a method's
        """Call a method of the owner, whoever it is by then.

        An actor that does not answer at once may be dead, and it takes Ray seconds to say so: then
        the other is asked as well. It refuses while the first one lives.

        Raises:
            StoreError: what the method raised, or no actor was there for a minute.
        """
        asked: dict[Any, int] = {}
        refused: set[int] = set()
        turn, died_s = self.at, 0.0
        while True:
            if turn not in asked.values():
                asked[getattr(self.actors[turn], method).remote(*args, **options)] = turn
            done, _ = ray.wait(list(asked), timeout=_ELSEWHERE_S)
            for call in done:
                answers = asked.pop(call)
                try:
                    answer = ray.get(call)
                except RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, StoreError) else error) from None
                except RayActorError as error:
                    refused.clear()
                    died_s = died_s or time.monotonic()
                    _check_patience(died_s, error)
                    continue
                if not isinstance(answer, _StandingBy):
                    self.at = answers
                    return answer
                refused.add(answers)
                if len(refused) == len(self.actors):
                    raise answer
            turn = (turn + 1) % len(self.actors)
            if died_s and not asked and turn == self.at:
                time.sleep(_PAUSE_S)  # neither is there yet


def _check_patience(died_s: float, error: RayActorError) -> None:
    if time.monotonic() - died_s > _PATIENCE_S:
        raise StoreError(
            f"the store's server was away for {_PATIENCE_S:.0f} s: {error}. What it acknowledged "
            "is safe; whether the last request was carried out is unknown, and repeating it is "
            "harmless. Start StoreServer again."
        ) from error


def _actor(name: str | None, *place: Any) -> Any:  # noqa: ANN401 - Ray's handles have no type
    """Start a _Server on this node, or find the one of that name."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = ray.remote(_Server).options(
        name=name,
        get_if_exists=name is not None,
        max_restarts=-1,
        max_task_retries=0,  # a lost call goes to the other actor, and not to a restart
        max_concurrency=_CALLS,
        num_cpus=0,
        scheduling_strategy=here,
    )
    return options.remote(*place)


@dataclass(frozen=True)
class StoreServer:
    """A store whose index one Ray actor owns. May be sent to workers.

    Attributes:
        handle: of the actor; one of any class that has `call` as _Server has it.
        path: where the packs are. filesystem: on which pyarrow file system; None: a directory.
        standby: another actor that takes over when that one dies; None: wait for its restart.
    """

    handle: Any
    path: str
    filesystem: FileSystem | None = field(default=None, hash=False)  # it has none
    standby: Any = None

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str],
        *,
        filesystem: FileSystem | None = None,
        index: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> Self:
        """Start the actors on this node, or find those of that name.

        Args:
            path: as Store takes it; every worker must reach it.
            filesystem: as Store takes it.
            index: directory of the index, on a disk of this node.
            name: of the actor; the one that stands by has it with `-standby`. None: none.

        Raises:
            Conflict: another process uses this store.
        """
        root, remote, folder = locate(path, filesystem, index)
        place = os.fspath(path) if remote else root  # the actor has a working folder of its own
        where = place, filesystem, str(folder) if index else None
        second = _actor(name and f"{name}-standby", *where)
        server = cls(_actor(name, *where), place, filesystem, second)
        try:
            server.about()
        except StoreError:
            if name is None:
                server._kill()
            raise
        return server

    @classmethod
    def beside(cls, path: str | os.PathLike[str], name: str) -> Self:
        """Start an actor of that name on this node, for processes that are elsewhere.

        Those of this machine go on opening the directory themselves. Nobody stands by: a second
        actor would not refuse while the first one lives, and could carry out a request long after
        its caller had the answer. Does not wait for the actor.
        """
        root, _, _ = locate(path, None, None)
        return cls(_actor(name, root, None, None, False), root)

    def open(self) -> Store:
        """The Store as this process sees it; it writes packs of its own."""
        ledger = cast(Ledger, _Client(partial(self._line().ask, "call")))
        return Store(self.path, filesystem=self.filesystem, ledger=ledger)

    def about(self) -> dict[str, int]:
        """Process id of the actor and commits since it started; waits while there is none."""
        return dict(self._line().ask("about"))

    def stop(self) -> None:
        """Close the index and end the actors."""
        for actor in self._line().actors:
            with suppress(RayActorError):  # it is dead, and what it had is adopted at next opening
                ray.get(actor.close.remote())
        self._kill()

    def _line(self) -> _Line:
        return _Line([actor for actor in (self.handle, self.standby) if actor is not None])

    def _kill(self) -> None:
        for actor in self._line().actors:
            ray.kill(actor, no_restart=True)

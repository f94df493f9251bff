"""Ray's paragraph on a dead worker is not printed where elastix tells of the death itself.

Ray prints to the driver a thousand characters on every worker that was killed: that it may have
been the OOM killer, and what to do then. Workers whose end is meant are ended in a way for which
it prints nothing (`ray.kill`), so this is about those that were lost alone. Whatever else Ray has
to say is printed as ever, of other people's actors too.

Not here: how a loss is told (console). Invariant: a paragraph is dropped only if elastix has told
of that very process; one that comes sooner is held back until then, or until the end.
"""

import re
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, Self

import ray._private.worker as ray_worker

from elastix.events import Event, WorkerLost, WorkerStarted

_DEATH = re.compile(r"A worker died or was killed\b.* Node ID: (\w+)\b.* Worker PID: (\d+)\b", re.S)
_PRINTER = "print_to_stdstream"  # what Ray's listener calls; private, so it may be gone one day

Process = tuple[str, int]


class Deaths:
    """Holds back what Ray says of some processes' deaths, between `open` and `close`."""

    _lock: ClassVar = threading.Lock()
    _opened: ClassVar[list["Deaths"]] = []
    _print: ClassVar[Any] = None
    _late: ClassVar[set[Process]] = set()  # told of; the paragraph comes when all are closed

    def __init__(self) -> None:
        self._ours: set[Process] = set()
        self._told: set[Process] = set()
        self._said: set[Process] = set()
        self._held: dict[Process, tuple[Any, ...]] = {}

    def expect(self, node: str, pid: int) -> None:
        """If this process dies, elastix says so: `node` is its node's id."""
        with self._lock:
            self._ours.add((node, pid))
            for seen in (self._told, self._said, self._late):
                seen.discard((node, pid))

    def told(self, node: str, pid: int) -> None:
        """Elastix has said so."""
        with self._lock:
            self._told.add((node, pid))
            self._held.pop((node, pid), None)

    def open(self) -> Self:
        """Begin."""
        with self._lock:
            if Deaths._print is None and hasattr(ray_worker, _PRINTER):
                Deaths._print = staticmethod(getattr(ray_worker, _PRINTER))
                setattr(ray_worker, _PRINTER, _print_unless_told)
            self._opened.append(self)
        return self

    def close(self) -> None:
        """Ray prints as before, and what elastix has not told of. Again does nothing.

        Ray's paragraph on a death may come later than this; it is dropped all the same.
        """
        with self._lock:
            if self not in self._opened:
                return
            self._opened.remove(self)
            self._late.update(self._told - self._said)
            printer = Deaths._print or getattr(ray_worker, _PRINTER)
            _restore()
        for said in self._held.values():
            printer(*said)
        self._held.clear()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _takes(self, process: Process, said: tuple[Any, ...]) -> bool:
        if process not in self._ours:
            return False
        self._said.add(process)
        if process not in self._told:
            self._held[process] = said
        return True


class GroupDeaths:
    """Tells of one run's workers, as its events come."""

    def __init__(self, deaths: Deaths) -> None:
        self._deaths = deaths
        self._processes: dict[int, list[Process]] = {}

    def hear(self, event: Event) -> None:
        """One event of the run."""
        if isinstance(event, WorkerStarted):
            processes = [(event.node, event.pid), *event.mates]
            self._processes[event.worker] = processes
            for process in processes:
                self._deaths.expect(*process)
        elif isinstance(event, WorkerLost):
            for process in self._processes.get(event.worker, ()):
                self._deaths.told(*process)


def _restore() -> None:
    """Ray's own printer again, if nothing is held back any more. Under the lock."""
    if not Deaths._opened and not Deaths._late and Deaths._print is not None:
        setattr(ray_worker, _PRINTER, Deaths._print)
        Deaths._print = None


def _print_unless_told(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """In place of Ray's own; called by its listening thread."""
    found = _DEATH.match("\n".join(data["lines"])) if data.get("pid") == "raylet" else None
    process = (found[1], int(found[2])) if found else None
    with Deaths._lock:
        printer = Deaths._print or getattr(ray_worker, _PRINTER)
        if process is not None:
            said = (data, ignore_prefix)
            if any(deaths._takes(process, said) for deaths in Deaths._opened):
                return
            if process in Deaths._late:
                Deaths._late.remove(process)
                _restore()
                return
    printer(data, ignore_prefix)

"""Trials one after the other in this process: for tests, and for a debugger."""

import threading
from collections import Counter, deque
from collections.abc import Sequence

from elastix.errors import ConfigError, SearchError
from elastix.search.executors import outside_generators
from elastix.search.executors.executor import Ended, TrainFunction, Work, WorkReport
from elastix.search.executors.in_process import computes, execute
from elastix.search.executors.trial_memory import resident
from elastix.search.model_sources import StoreDirectory, let_go

_one_at_a_time = threading.RLock()  # random numbers and settings are the process's
_users: Counter[StoreDirectory] = Counter()  # executors of this process, by store
_counting = threading.Lock()


class Local:
    """Runs what was submitted inside of `poll`. Nothing survives a crash of the train function.

    Nor is there another process when a GPU does nothing any more for this one: the campaign ends.
    Campaigns in several threads take turns: two trials at once would share random numbers.
    """

    def __init__(self) -> None:
        self._train: TrainFunction | None = None
        self._waiting: deque[Work] = deque()
        self._halted: set[int] = set()
        self._store: StoreDirectory | None = None

    def open(self, train: TrainFunction) -> None:
        """See Executor."""
        self._train = train
        outside_generators.look_again(train)

    def reach(self, store: str) -> StoreDirectory:
        """See Executor."""
        self._leave_store()
        self._store = StoreDirectory(store)
        with _counting:
            _users[self._store] += 1
        return self._store

    @property
    def room(self) -> int:
        """One at a time."""
        return 1 - len(self._waiting)

    @property
    def idle_bytes(self) -> int:
        """What this process holds."""
        return resident()

    def submit(self, work: Work) -> None:
        """See Executor."""
        if self._train is None:
            raise ConfigError("Local.submit was called before open. Nothing was run.")
        self._waiting.append(work)

    def poll(self, timeout_s: float) -> Sequence[WorkReport | Ended]:
        """Run one piece of work to its end, however long that takes.

        Raises:
            SearchError: nothing can be computed in this process any more.
        """
        del timeout_s
        if not self._waiting or self._train is None:
            return []
        if not computes():
            raise SearchError(
                f"the GPU does nothing any more for this process, in which trials run one after "
                f"the other: all later ones would fail of that. Trial {self._waiting[0].number} "
                "was not run, and nothing is lost. Start the script again: its campaign goes on."
            )
        work = self._waiting.popleft()
        is_halted = work.number in self._halted
        self._halted.discard(work.number)
        told: list[WorkReport | Ended] = []
        with _one_at_a_time:
            ended = execute(
                self._train, work, worker="local", tell=told.append, halted=lambda: is_halted
            )
        return [*told, ended]

    def halt(self, number: int) -> None:
        """Only work that has not begun can be halted: the caller of `poll` waits for the rest."""
        if any(work.number == number for work in self._waiting):
            self._halted.add(number)

    def close(self) -> None:
        """Forget what was submitted; the next campaign may have another store."""
        self._waiting.clear()
        self._halted.clear()
        self._leave_store()

    def _leave_store(self) -> None:
        """Close it, unless a campaign in another thread is at work with it."""
        store, self._store = self._store, None
        if store is None:
            return
        with _counting:
            _users[store] -= 1
            if not _users[store]:
                let_go(store)

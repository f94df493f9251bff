"""The processes of this worker: how they come together, and whether one of them is lost.

Most workers are one process. Then there is nothing to assemble, and nothing that can break.

Not here: what they do together while all are there (crew_mates), and what becomes of one that is
left (Member.disband).

Invariant: a worker that lacks a process is broken, and each process of it comes out of whatever it
waits in. `break_up` and `broken` are for any thread.
"""

from elastix.comm.driver import GroupDriver
from elastix.comm.network.crew_world import DeviceMesh
from elastix.comm.network.process_group import Wiring
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.errors import TrainError
from elastix.train.replica.crew_mates import Mates
from elastix.train.replica.link import Settings


class WorkerProcesses:
    """Of one worker, as one of them sees it.

    Args:
        me: the worker.
        settings: of the run.
        driver: of its group.
        inbox: what it is told.

    Attributes:
        mates: all of them, once they have come together; None if the worker is one process.
    """

    def __init__(
        self, me: int, settings: Settings, driver: GroupDriver, inbox: ThreadSafeInbox
    ) -> None:
        self.mates: Mates | None = None
        self._me = me
        self._settings = settings
        self._driver = driver
        self._inbox = inbox

    def assemble(self, wiring: Wiring) -> None:
        """Come together with the others; blocks until all are here.

        Raises:
            OSError, RuntimeError: one of them is lost.
        """
        if self._settings.crew:
            self.mates = Mates(self._driver, wiring, self._settings.crew, self._inbox)
            if self._driver.broken:  # it was, before there was anything to cut
                self.mates.cut()
            self.mates.assemble()

    @property
    def mesh(self) -> DeviceMesh | None:
        """Of them; None if it is one."""
        return self.mates.mesh if self.mates is not None else None

    def break_up(self) -> None:
        """One of them is lost: come out of whatever this one is in."""
        self._driver.break_up()
        if self.mates is not None:
            self.mates.cut()
        self._inbox.notify()

    def cut_if_broken(self) -> None:
        """The group has changed: perhaps without this worker."""
        if self.mates is not None and self.broken:
            self.mates.cut()

    def look(self) -> None:
        """See whether they wait for each other. Now and then, in one thread."""
        if self.mates is not None:
            self.mates.look()

    @property
    def parted(self) -> TrainError | None:
        """What is wrong if they do."""
        return self.mates.parted if self.mates is not None else None

    @property
    def broken(self) -> bool:
        """Whether one of them is lost, or the worker was taken out."""
        urgent = self._inbox.urgent
        # A newcomer that was left out of a generation is let in by a later one.
        outdated = self._driver.has_state and urgent.generation > self._driver.generation
        fenced = outdated and self._me not in urgent.members
        return bool(self._settings.crew) and (self._driver.broken or fenced)

    def await_broken(self, timeout_s: float) -> bool:
        """Whether that is so, as is heard within that time."""
        self._inbox.wait(lambda: self.broken, timeout_s)
        return self.broken

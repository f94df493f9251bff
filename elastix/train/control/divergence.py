"""What is done about workers that hold different States. Pure.

What most hold stands, and the others are taken out. All go back to a stored State if nobody can say
which is right; or if steps that count may have been computed from what is wrong, in an exact run,
which is to end with the bytes of one in which nothing was. Not here: how it is found
(replica.step_commits), and which State that is (record.conductor_shell).
"""

from collections.abc import Collection

from elastix.errors import ElastixError
from elastix.events import ReplicasDiverged, Resumed
from elastix.train.control import limits
from elastix.train.control.messages import Diverged


def as_event(said: Diverged, cure: str) -> ReplicasDiverged:
    """For the journal."""
    return ReplicasDiverged(
        step=said.step,
        workers=said.workers,
        apart=said.apart,
        parts=said.parts,
        cure=cure,
        unseen=said.unseen,
    )


class Divergences:
    """Those of one run.

    Args:
        replaces: workers may be started in place of others.
    """

    def __init__(self, *, replaces: bool) -> None:
        self._replaces = replaces
        self._steps: list[int] = []  # after which they were seen to have parted
        self._for: Diverged | None = None  # all are about to go back

    @property
    def goes_back(self) -> bool:
        """Whether all are about to go back for one."""
        return self._for is not None

    def judge(
        self, said: Diverged, present: Collection[int]
    ) -> ReplicasDiverged | ElastixError | None:
        """What is to be done, as the event that says so; the error that ends the run; None: done.

        Args:
            said: by a worker of the group, as by all others.
            present: workers at work.
        """
        if not said.unseen and not any(worker in present for worker in said.apart):
            return None  # it was told before
        evicts = not said.unseen and len(said.apart) < len(said.workers)
        self._steps.append(said.step)
        if not (evicts or self._replaces) or limits.diverges_often(self._steps):
            return said.error
        self._for = None if evicts else said
        return as_event(said, "evicted" if evicts else "went back")

    def went_back(self, stored: Resumed) -> ElastixError | None:
        """All go on from there; or not, and the run ends with this error.

        Of an exact run it is known from where the same bytes come once more: the beginning, too. It
        ends if it comes to nothing again and again.
        """
        said, self._for = self._for, None
        if said is None:
            return None
        if said.unseen:
            self._steps[-1] = stored.step
            return said.error if limits.diverges_often(self._steps) else None
        # A trial may begin at its pause: its State was compared. Parts that are held were not.
        begins = stored.ref or (stored.step and not stored.held)
        return None if begins else said.error  # there is no State that was ever found equal

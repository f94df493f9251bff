"""What a worker says of its way in the group: to the conductor, and to the journal.

It is the GroupListener of GroupDriver. What becomes of steps is said elsewhere (replicated_events),
once for all workers; this is what each says of itself.
"""

from collections.abc import Callable

from elastix.comm.protocol.calls import OperationKind
from elastix.comm.protocol.participant import Joined, Recovery
from elastix.events import Recovered, ShadowDiffers, WorkerJoined
from elastix.train.checkpoint import state_digests
from elastix.train.control.messages import CaughtUp, Entered, Succeeded, Suspect
from elastix.train.replica.parts import WorkerParts
from elastix.train.replica.step_commits import StepCommits


class GroupNews:
    """See the module, and GroupListener.

    Args:
        parts: of the worker.
        steps: of it.
        ready: says that the worker can be given members to follow.
    """

    def __init__(self, parts: WorkerParts, steps: StepCommits, ready: Callable[[], None]) -> None:
        self._me = parts.me
        self._link = parts.link
        self._driver = parts.driver
        self._replicated = parts.replicated
        self._phase = parts.phase
        self._steps = steps
        self._ready = ready
        self._distance: tuple[tuple[str, ...], int] | None = None  # as a shadow, from the group

    def level(self, *, equal: bool) -> None:
        """This joiner can come in, or this shadow has the State."""
        self._link.send(CaughtUp(equal=equal))

    def lonely(self) -> None:
        """Nobody is left whom this joiner could watch."""
        self._ready()

    def unequal(self, operation: int, followed: int, mine: str, theirs: str) -> None:
        """The State is not that of the worker that this one follows."""
        self._phase("unequal", operation)
        parts = state_digests.apart(mine, theirs)
        if self._driver.shadow and (parts, followed) != self._distance:
            self._distance = parts, followed
            self._link.emit(
                ShadowDiffers(
                    worker=self._me, step=self._steps.step, followed=followed, parts=parts
                )
            )

    def succeed(self, *, equal: bool) -> None:
        """All members are lost, and this shadow goes on in their place."""
        self._link.send(
            Succeeded(
                step=self._steps.step,
                since=self._replicated.since,
                sequence=self._replicated.sequence,
                equal=equal and not self._steps.foreign,
            )
        )

    def entered(self, generation: int, joined: Joined | None) -> None:
        """In the group of `generation`, with the State."""
        self._link.send(Entered(generation))
        if joined is not None:
            self._steps.checks.entered()
        if joined is not None and self._steps.step > 0:
            self._link.emit(
                WorkerJoined(
                    worker=self._me,
                    generation=generation,
                    step=self._steps.step,
                    copy_s=joined.copy_s,
                    copy_bytes=joined.copy_bytes,
                    watched_steps=joined.watched_steps,
                )
            )
        self._replicated.send_again()

    def recovered(self, recovery: Recovery) -> None:
        """Through with a change of the group."""
        self._link.emit(
            Recovered(
                worker=self._me,
                generation=recovery.generation,
                step=self._steps.step + (recovery.kind == OperationKind.STEP),
                outcome=recovery.outcome,
                rebuild_s=recovery.rebuild_s,
                stall_s=recovery.stall_s,
            )
        )

    def doubt(self, generation: int, error: BaseException, unreachable: frozenset[int]) -> None:
        """An operation failed, or these could not be reached."""
        self._link.send(Suspect(generation, repr(error), unreachable))

"""Whether a run has workers enough, and what becomes of one that has not. Pure.

A group below its minimum waits for others; when it has waited in vain, its workers are told to
store their State and leave. Not here: who is in the group (comm.protocol.membership).
"""

from collections.abc import Mapping

from elastix.config import FailureConfig
from elastix.errors import ElastixError, QuorumLost
from elastix.train.control.limits import what_stands, who_is_gone
from elastix.train.control.run_state import RunState


class Quorum:
    """Judges the number of workers, again and again. All times are of one monotonic clock.

    Args:
        minimum: workers with the State below which no step is taken.
        failure: the run's.
    """

    def __init__(self, minimum: int, failure: FailureConfig) -> None:
        self._minimum = minimum
        self._failure = failure
        self._short_since: float | None = None
        self._dismissed = False

    def judge(
        self,
        present: int,
        *,
        founded: bool,
        coming: bool,
        state: RunState,
        now: float,
    ) -> str | ElastixError | None:
        """What is to happen now.

        Args:
            present: workers that have the State.
            founded: the group has come about, now or before.
            coming: others are being started, or could be.
            state: what the run has told so far.
            now: seconds.

        Returns:
            None: go on, or wait. Text: what all workers are told, who then store their State and
            leave; said once. An error: what ends the run at once.
        """
        if present >= self._minimum:
            self._short_since = None
            return None
        if self._short_since is None:
            self._short_since = now
        wait_s = self._failure.wait_s if founded else self._failure.start_timeout_s
        awaited = self._failure.replace or not founded or self._dismissed or coming
        if awaited and now - self._short_since <= wait_s:
            return None
        if not founded:
            return _no_group(self._minimum, wait_s, state)
        if self._dismissed:
            return _never_dismissed(present, self._minimum, wait_s, state.step)
        self._dismissed = True
        self._short_since = now
        return _dismissal(present, self._minimum, wait_s if awaited else None, state.gone)

    def was_away(self, seconds: float, now: float) -> None:
        """Nobody could come for so long."""
        if self._short_since is not None:
            self._short_since = min(self._short_since + seconds, now)

    def start_over(self) -> None:
        """A new group is founded; waiting begins anew."""
        self._short_since = None


def _no_group(minimum: int, waited_s: float, state: RunState) -> QuorumLost:
    """The group did not come about in time."""
    lost = f"; {who_is_gone(state.gone)}" if state.gone else ""
    return QuorumLost(
        f"no group of {minimum} workers came about within start_timeout_s={waited_s:g}{lost}. "
        f"{what_stands(state)} Look at the workers' logs, or raise it if they start slowly."
    )


def _dismissal(present: int, minimum: int, waited_s: float | None, gone: Mapping[int, str]) -> str:
    """What workers are told that have waited for others in vain; None: there was nothing to."""
    why = "replace=False" if waited_s is None else f"none came within wait_s={waited_s:g}"
    lost = f" Since the last step {who_is_gone(gone)}." if gone else ""
    return (
        f"{present} workers are left, num_workers has a minimum of {minimum}, and {why}. "
        f"They stored their State; calling fit() again goes on from it.{lost} Free resources on "
        "the cluster, or lower the minimum."
    )


def _never_dismissed(present: int, minimum: int, waited_s: float, step: int) -> QuorumLost:
    """They did not even come to the point where they are told so."""
    return QuorumLost(
        f"{present} workers are left of at least {minimum}, and they did not reach the end "
        f"of a step within another {waited_s:g} s. The run was stopped after step "
        f"{step}; calling fit() again goes on from the last stored State."
    )

"""Where the training thread of a crew's process stands: seen by another thread, again and again.

Not here: what follows if places stand at different points (protocol.standing).
"""

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from elastix.comm.protocol.standing import BATCHES, Standing

_CALLS_TRAIN = "elastix.train.replica.train_function"
_PIPELINING = "torch.distributed.pipelining"
_SENDING = "torch.distributed.distributed_c10d"
_WAIT = "_wait_batch_p2p"
"""Of its schedules, where they wait for what other stages send, or for their own sends."""
_OURS = {"elastix", "torch", *sys.stdlib_module_names}


class PlaceWatch:
    """Watches nothing until it is told what to count."""

    def __init__(self) -> None:
        self._count: Callable[[], Mapping[str, int]] | None = None
        self._carried: Callable[[], int | None] | None = None
        self._thread = 0
        self._batches = 0
        self._last: tuple[int, Mapping[str, int]] = (0, {})
        self._inside = False
        self._seen: object = None
        self._bytes: int | None = None
        self._since = 0.0

    def begin(
        self,
        count: Callable[[], Mapping[str, int]],
        carried: Callable[[], int | None] | None = None,
    ) -> None:
        """Watch the thread that calls this.

        Args:
            count: by group of places, how many collectives this one has begun; any thread.
            carried: bytes between this place and others, where they send to each other; None while
                some are on their way; any thread.
        """
        self._count, self._carried, self._thread = count, carried, threading.get_ident()

    def come(self, position: int, *, batch: bool = False) -> None:
        """The thread comes to a call that all places make; before a batch, or not."""
        if self._count is not None:
            self._batches += batch
            self._last, self._inside = (position, self._counted()), True

    def stay(self) -> None:
        """It goes on with that call, after user code has computed something for it."""
        self._inside = True

    def go(self) -> None:
        """It is through with that call."""
        self._inside = False

    def look(self, now: float) -> Standing | None:
        """Where it stands, if it has not moved since the last look. To be called by one thread."""
        where, in_torch, scheduled = _where(sys._current_frames().get(self._thread))
        scheduled = scheduled and not self._inside
        counted = self._counted()
        seen = self._last, self._inside, scheduled, counted
        moved = self._count is None or seen != self._seen
        had, self._bytes = self._bytes, None
        if self._carried is not None and not moved:  # it is a look at all connections
            self._bytes = self._carried()
            moved = had is None or had != self._bytes
        if moved:
            self._seen, self._since = seen, now
            return None
        position, before = self._last
        return Standing(
            position=position,
            before=before,
            now=counted,
            still_s=now - self._since,
            busy=not (self._inside or in_torch),
            where=where,
            inside=self._inside,
            scheduled=scheduled,
        )

    def _counted(self) -> dict[str, int]:
        counted = self._count() if self._count is not None else {}
        return {**counted, BATCHES: self._batches}


def _where(frame: FrameType | None) -> tuple[str, bool, bool]:
    """The line of the train function, and the innermost one of user code; whether torch is in it.

    A model may be called from many lines, and where it is itself is of use as well. The last is
    whether torch is waiting in a schedule of a pipeline, rather than computing.
    """
    lines: list[str] = []
    in_torch = sends = scheduled = False
    innermost = frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == _CALLS_TRAIN:
            break
        if frame is innermost:
            sends = module == _SENDING or frame.f_code.co_name == _WAIT
        package = module.partition(".")[0]
        in_torch = in_torch or (package == "torch" and not lines)
        scheduled = scheduled or (module.startswith(_PIPELINING) and not lines)
        if package not in _OURS:
            lines.append(f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}")
        frame = frame.f_back
    ends = dict.fromkeys([*lines[-1:], *lines[:1]])
    said = " in ".join(reversed(ends)) or "no line of user code"
    return said, in_torch, scheduled and sends

"""Run a train function alone: a group of one in the calling process, without Ray and sockets.

The same Member, Context and loader as in a group of many, so a train function cannot tell. What
it costs beside the function itself is some tens of microseconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from elastix.comm.network.process_group import Wiring
from elastix.comm.protocol.membership import Membership
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.errors import StoreError
from elastix.events import Event
from elastix.store import Store
from elastix.train.control.messages import FromWorker, Outcome
from elastix.train.replica import used_models
from elastix.train.replica.context import Context
from elastix.train.replica.link import Settings
from elastix.train.replica.member import Member
from elastix.train.replica.train_function import Halted, run_train

_MAY_END = ("boundary", "evaluate", "report")
_WIRING = Wiring(address=("", 0), interface="", backend="gloo", me=0)


class _SoloLink:
    """The Link of a worker that nobody else waits for."""

    def __init__(self, listen: Callable[[Event], None]) -> None:
        self._listen = listen
        self._sequence = -1

    def send(self, message: FromWorker) -> None:
        """Nobody leads this run, and nobody puts checkpoints together."""

    def emit(self, event: Event, sequence: int | None = None) -> None:
        """See Link."""
        if sequence is None or sequence > self._sequence:
            self._listen(event)
            self._sequence = self._sequence if sequence is None else sequence

    def journaled(self) -> int:
        """See Link."""
        return self._sequence

    def phase(self, name: str, detail: int) -> None:
        """See Link."""

    def await_controller(self) -> None:
        """There is none."""

    def open_store(self) -> Store:
        """Refused: what is worth keeping goes to the model source."""
        raise StoreError("a run that is alone in its process keeps no checkpoints.")


def run_alone(
    train: Callable[[Context], None],
    config: Mapping[str, Any],
    settings: Settings,
    listen: Callable[[Event], None],
    *,
    device: torch.device | None = None,
    halted: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Call `train` with a Context of world size 1. Blocks until it is through.

    Args:
        train: the function.
        config: for `ctx.config`.
        settings: `alone` must be set; what is to be stored goes to its model source.
        listen: is called with every event, in this thread.
        device: where models and batches go; the CPU by default.
        halted: once it is so, the run ends at the next boundary of a step or report: kind "halted".

    Raises:
        KeyboardInterrupt: Ctrl-C; nothing else is ever raised.
    """
    inbox = ThreadSafeInbox()
    inbox.publish(Membership(1, (0,), cause="start"))
    wiring = replace(_WIRING, device=device or torch.device("cpu"))
    member = Member(wiring, settings, inbox, _SoloLink(listen))

    def look(name: str, _detail: int) -> None:
        if name in _MAY_END and halted():
            raise Halted

    member.on_phase(look)
    try:
        with used_models.optimizers_watched():
            return run_train(train, member, config)
    finally:
        member.close()

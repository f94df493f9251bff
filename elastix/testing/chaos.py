"""Kill workers at chosen places of a run, for real.

A killed worker sends itself SIGKILL (or SIGSTOP) from inside the training thread, at a phase of
`Context.on_phase`; nobody is told beforehand. Workers are named by id, which are the initial
ranks: a replacement has a new id and is not hit again.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals

from elastix.train.context import Context


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One worker's end.

    Attributes:
        worker: its id.
        phase: where, as Context.on_phase names it.
        step: number of committed steps at that moment; None for any.
        detail: of the phase; None for any.
        after: how many times the place is passed before.
        signal: SIGKILL, SIGSTOP, SIGSEGV.
    """

    worker: int
    phase: str
    step: int | None = None
    detail: int | None = None
    after: int = 0
    signal: Signals = SIGKILL


@dataclass(frozen=True)
class with_kills:  # noqa: N801 - used like a function
    """The train function `train`, with an end in store for some of its workers.

    Attributes:
        train: any train function.
        kills: each happens at most once.
        log: gets one line "MONOTONIC_SECONDS WORKER" per kill, just before it.
    """

    train: Callable[[Context], None]
    kills: Sequence[Kill]
    log: Path | None = None

    def __call__(self, ctx: Context) -> None:
        """Run it."""
        mine = [kill for kill in self.kills if kill.worker == ctx.worker]
        passed = [0] * len(mine)

        def look(phase: str, detail: int) -> None:
            for index, kill in enumerate(mine):
                if kill.phase != phase or kill.step not in (None, ctx.step):
                    continue
                if kill.detail not in (None, detail):
                    continue
                passed[index] += 1
                if passed[index] == kill.after + 1:
                    _strike(kill, self.log)

        ctx.on_phase(look)
        self.train(ctx)


def _strike(kill: Kill, log: Path | None) -> None:
    if log is not None:
        with log.open("a") as file:
            file.write(f"{time.monotonic()!r} {kill.worker}\n")
    os.kill(os.getpid(), kill.signal)

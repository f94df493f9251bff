"""Kill workers at chosen places of a run, for real; hang them, cut them off, or flip their bits.

A killed worker sends itself SIGKILL (or another signal) from inside the training thread, at a phase
of `Context.on_phase`; nobody is told beforehand. Workers are named by id, which are the initial
ranks: a replacement has a new id and is not hit again.
"""

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, cast

import numpy as np
import torch

from elastix.arguments import check_fields, check_train, checked, closest, require
from elastix.comm.network import process_group
from elastix.errors import ConfigError
from elastix.state import raw_bytes
from elastix.train.replica.context import Context
from elastix.train.replica.link import PHASES
from elastix.train.replica.member import Member


class Harm(Enum):
    """What can befall a worker that does not die of it.

    HANG: its training thread never comes back, as from an endless loop in user code.
    HOLD_GIL: nor does it let any other thread of the process run.
    CUT: every connection to another host or process of the group is broken.
    """

    HANG = "hang"
    HOLD_GIL = "hold the GIL"
    CUT = "cut"


HANG, HOLD_GIL, CUT = Harm


@checked
@dataclass(frozen=True, kw_only=True)
class Kill:
    """One worker's end.

    Attributes:
        worker: its id.
        phase: where, as Context.on_phase names it.
        step: number of committed steps at that moment, or more if the worker is not there
            yet by then, as a slow starter or a spare; None for any.
        detail: of the phase; None for any.
        after: how many times the place is passed before.
        signal: SIGKILL, SIGSTOP, SIGSEGV, SIGTERM; or a Harm.
        lasting: for CUT, no new connection can be made either.
    """

    worker: int
    phase: str
    step: int | None = None
    detail: int | None = None
    after: int = 0
    signal: Signals | Harm = SIGKILL
    lasting: bool = False

    def __post_init__(self) -> None:
        """Refuse what could hit nobody. A number of a signal becomes that signal."""
        check_fields(self)
        _check_place(self)
        if not isinstance(self.signal, Harm):
            try:
                object.__setattr__(self, "signal", Signals(self.signal))
            except ValueError as error:
                raise ConfigError(
                    f"Kill: signal must be a signal or a Harm, not {self.signal!r}. Nothing was "
                    "started. Give signal.SIGTERM, say, or HANG, HOLD_GIL or CUT."
                ) from error


@checked
@dataclass(frozen=True, kw_only=True)
class Flip:
    """A bit of what one worker holds is another one from then on, as from faulty memory.

    Attributes:
        worker: its id.
        tensor: its name in a State: `body.weight`, or `@optimizer/state/body.weight/exp_avg`; or
            `@gradient/body.weight` for what backward has left there, or
            `@backward/body.weight` for what the next backward pass computes, as from a processor
            that miscalculates.
        phase, step, detail, after: where, as for Kill.
        byte, bit: which one of the tensor's memory.
        lasting: for `@backward`, each pass from then on.
    """

    worker: int
    tensor: str
    phase: str = "boundary"
    step: int | None = None
    detail: int | None = None
    after: int = 0
    byte: int = 0
    bit: int = 0
    lasting: bool = False

    def __post_init__(self) -> None:
        """Refuse what could hit nobody."""
        check_fields(self)
        _check_place(self)
        require(
            0 <= self.bit <= 7 and self.byte >= 0,
            f"Flip: a byte has bits 0 to 7, and bytes count from 0; got byte={self.byte}, "
            f"bit={self.bit}. Nothing was started.",
        )


def _check_place(hit: Kill | Flip) -> None:
    require(
        hit.phase in PHASES,
        f"there is no phase {hit.phase!r}, so nobody would be hit. Nothing was started. There are "
        f"{', '.join(PHASES)}: see Context.on_phase.",
    )
    require(
        hit.worker >= 0 and hit.after >= 0,
        f"workers, and how often a place is passed, count from 0, so nobody would be hit: {hit}. "
        "Nothing was started.",
    )


@checked
@dataclass(frozen=True)
class with_kills:  # noqa: N801 - used like a function
    """The train function `train`, with an end in store for some of its workers.

    Attributes:
        train: any train function.
        kills: each happens at most once; a Flip is no end, but may stand among them.
        log: gets one line "MONOTONIC_SECONDS WORKER" per kill, just before it.
    """

    train: Callable[[Context], None]
    kills: Sequence[Kill | Flip]
    log: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what would end the train function in the middle of a run."""
        check_train(self.train, "config")
        hits = self.kills
        require(
            isinstance(hits, list | tuple) and all(isinstance(hit, Kill | Flip) for hit in hits),
            f"with_kills: kills must be a list of Kill and Flip, not {hits!r}. Nothing was "
            "started.",
        )
        if self.log is not None:
            object.__setattr__(self, "log", Path(self.log))

    def __call__(self, ctx: Context) -> None:
        """Run it."""
        mine = [kill for kill in self.kills if kill.worker == ctx.worker]
        passed = [0] * len(mine)

        def look(phase: str, detail: int) -> None:
            for index, kill in enumerate(mine):
                if kill.phase != phase or ctx.step < (kill.step or 0):
                    continue
                if kill.detail not in (None, detail):
                    continue
                passed[index] += 1
                if passed[index] == kill.after + 1:
                    _strike(kill, self.log, ctx)

        ctx.on_phase(look)
        self.train(ctx)


def _strike(kill: Kill | Flip, log: Path | None, ctx: Context) -> None:
    if log is not None:
        with log.open("a") as file:
            file.write(f"{time.monotonic()!r} {kill.worker}\n")
    if isinstance(kill, Flip):
        flip(kill, ctx)
    elif isinstance(kill.signal, Signals):
        os.kill(os.getpid(), kill.signal)
    elif kill.signal is HANG:
        threading.Event().wait()
    elif kill.signal is HOLD_GIL:
        ctypes.PyDLL(None).sleep(1 << 30)
    else:
        cut(lasting=kill.lasting)


def flip(flip: Flip, ctx: Context) -> None:
    """Now, in the live tensor itself and without torch's noticing, as a fault of memory goes.

    Raises:
        ConfigError: there is no such tensor, or nothing in it.
    """
    member = cast("Member", ctx._member)  # faults are for runs, not for their replay
    tensors: Mapping[str, torch.Tensor]
    if flip.tensor.startswith(("@backward/", "@gradient/")):
        where, _, name = flip.tensor.partition("/")
        tensors = dict(member._tracked.model.named_parameters(remove_duplicate=False))
    else:
        where, name, tensors = "", flip.tensor, member.capture().tensors
    found = tensors.get(name)
    aim = found.grad if where == "@gradient" and found is not None else found
    if aim is None or not aim.numel():
        why = "has nothing in it there" if name in tensors else "is none that this worker has"
        raise ConfigError(
            f"Flip: {flip.tensor!r} {why}. Nothing was flipped. {closest(name, list(tensors))}"
            "`elastix store show` lists the tensors of a State."
        )
    if where == "@backward":
        _miscalculate(aim, flip)
    else:
        _turn(aim, flip)


def _turn(tensor: Any, flip: Flip) -> None:  # noqa: ANN401 - a gradient may be None for mypy
    place, byte = divmod(flip.byte % tensor.nbytes, tensor.element_size())
    # Bytes of all of a tensor would be a copy where elements do not follow each other in memory.
    element = tensor.detach()[np.unravel_index(place, tensor.shape)]
    raw_bytes(element).numpy()[byte] ^= 1 << flip.bit


def _miscalculate(parameter: torch.Tensor, flip: Flip) -> None:
    def wrong(gradient: torch.Tensor) -> torch.Tensor:
        if not flip.lasting:
            hook.remove()
        other = gradient.clone()
        _turn(other, flip)
        return other

    hook = parameter.register_hook(wrong)


def cut(*, lasting: bool = False) -> None:
    """Shut down all internet sockets of this process; pipes to a supervisor stay."""
    if lasting:

        def unreachable(*_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
            raise OSError("network is unreachable")

        vars(process_group)["MeetingStore"] = unreachable
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    found.getpeername()  # gloo ends the process if it cannot listen any more
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed in the meantime, or not connected

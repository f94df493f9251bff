"""The worker's side of a local run: the same member as under Ray, tied to a pipe.

Not here: who starts workers and hears them (local.py). A worker ends when its supervisor does.
"""

import gc
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from elastix.comm.network import nccl
from elastix.comm.network.process_group import Backend, Wiring
from elastix.comm.protocol.membership import Membership
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.data.leaving import leave
from elastix.errors import QuorumLost
from elastix.events import Event
from elastix.store import Store
from elastix.train.control.messages import (
    CatchUp,
    Disband,
    Dismiss,
    FromWorker,
    Heartbeat,
    Leave,
    Measured,
    Outcome,
    OutcomeKind,
    RecordEvents,
    Started,
    StoreSoon,
)
from elastix.train.replica.context import Context
from elastix.train.replica.link import FollowersLink, Life, Link, Settings
from elastix.train.replica.member import Member
from elastix.train.replica.notice import on_notice
from elastix.train.replica.train_function import let_go_of_memory, run_train
from elastix.train.replica.usage import EVERY_S, Parts, Usage
from elastix.train.replica.worker_state import KeptState

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine, shared by all processes of a local run.

    Attributes:
        backend: what carries tensors between them. NCCL refuses two processes on one GPU of one
            host, so each says that it is on a host of its own: NCCL then goes through sockets,
            which is slow and lets one GPU show what NCCL does when a peer is lost.
    """

    backend: Backend = "gloo"

    def take(self, process: int) -> torch.device:
        """The one that this process computes on; before anything else is done in it.

        Args:
            process: its number.
        """
        if self.backend == "nccl":
            nccl.settle_environment(host=f"elastix-local-{process}")
            os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        device = torch.device("cuda", process % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device


class _PipeLink:
    """The Link over a pipe. Its methods are described there."""

    def __init__(self, line: Connection, store: Path) -> None:
        self._line = line
        self._store = store
        self._lock = threading.Lock()
        self._sequence = -1
        self.over = False  # no further sign of life
        self._where = ("start", 0)
        self._passed = 0

    def send(self, message: FromWorker) -> None:
        self.tell(message)

    def tell(self, message: FromWorker | Outcome) -> None:
        with self._lock:
            self._line.send(message)

    def leave(self) -> None:
        self.send(Leave("notice"))

    def emit(self, event: Event, sequence: int | None = None) -> None:
        self.send(RecordEvents(((sequence, event),)))
        self._sequence = max(self._sequence, -1 if sequence is None else sequence)

    def journaled(self) -> int:
        return self._sequence - 1  # what was written to a pipe is read even if the writer dies

    def phase(self, name: str, detail: int) -> None:
        self._where = (name, detail)
        self._passed += 1

    def heartbeat(self, member: Member) -> Heartbeat:
        return Heartbeat(
            generation=member.generation,
            step=member.step,
            call=member.call,
            phase=self._where[0],
            detail=self._where[1],
            passed=self._passed,
            waiting=member.waiting,
            waited_s=member.waited_s,
        )

    def await_controller(self) -> None:
        pass  # workers end with their supervisor

    def open_store(self) -> Store:
        return Store(self._store)


def work(
    worker: int,
    line: Connection,
    address: tuple[str, int],
    train: Callable[[Context], None],
    config: dict[str, Any],
    settings: Settings,
    store: Path,
    gpus: Gpus | None = None,
) -> None:
    """A worker's process, from its fork to its end.

    Args:
        worker: its number.
        line: to the supervisor.
        address: where groups meet.
        train: the train function.
        config: given to it.
        settings: of the run.
        store: its directory.
        gpus: what it computes on; None: the CPU.
    """
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as under Ray; not as the supervisor
    os.register_at_fork(after_in_child=line.close)  # else it would outlive this process there
    device = gpus.take(worker) if gpus is not None else torch.device("cpu")
    gc.freeze()  # as under Ray
    inbox = ThreadSafeInbox()
    link = _PipeLink(line, store)
    wiring = Wiring(
        address=address,
        interface=HOST,
        backend=gpus.backend if gpus is not None else "gloo",
        me=worker,
        shared=settings.shared,
        secret=settings.secret,
        device=device,
    )
    member = Member(wiring, settings, inbox, link)
    listener = threading.Thread(target=_listen, args=(line, inbox, member), daemon=True)
    listener.start()
    link.send(Started(pid=os.getpid(), device=str(device)))
    threading.Thread(target=_pulse, args=(link, member), daemon=True).start()
    on_notice(link.leave)
    outcome = run_train(train, member, config)
    leave()
    member.saver.close()
    link.tell(outcome)
    if outcome.kind is OutcomeKind.LEFT:
        listener.join()  # others may still wait for what was sent to them
    line.close()
    os._exit(0)  # abandoned groups may have threads that wait for the dead


class _OneLife:
    """A process at one place of one worker, from its assembling until it is through, or free."""

    def __init__(
        self,
        life: Life,
        line: Connection,
        address: tuple[str, int],
        store: Path,
        backend: Backend,
        device: torch.device,
    ) -> None:
        self.inbox = ThreadSafeInbox()
        self.founds = life.founds
        pipe = _PipeLink(line, store)
        self.link = pipe
        settings = life.settings
        self.wiring = Wiring(
            address=address,
            interface=HOST,
            backend=backend,
            me=life.worker,
            shared=settings.shared,
            secret=settings.secret,
            place=life.place,
            device=device,
        )
        link: Link = FollowersLink(pipe) if life.place else pipe
        self.member = Member(self.wiring, settings, self.inbox, link)

    def run(
        self, train: Callable[[Context], None], config: dict[str, Any]
    ) -> tuple[Outcome, KeptState | None]:
        """From beginning to end, and what this process has of the State then, if it is free."""
        member, link = self.member, self.link
        link.send(Started(pid=os.getpid(), device=str(self.wiring.device)))
        pulse = threading.Thread(target=_pulse, args=(link, member), daemon=True)
        pulse.start()
        on_notice(link.leave)
        together = partial(member.processes.assemble, self.wiring)
        outcome = run_train(train, member, config, before=together)
        link.over = True
        pulse.join()
        member.saver.close()
        if outcome.kind is not OutcomeKind.FREE:
            return outcome, None
        kept = member.disband()
        return replace(outcome, kept=kept.told if kept is not None else None), kept


def work_in_crews(
    life: Life,
    line: Connection,
    address: tuple[str, int],
    train: Callable[[Context], None],
    config: dict[str, Any],
    store: Path,
    process: int,
    gpus: Gpus | None = None,
) -> None:
    """A process of a crew: one life after the other, as its workers are lost without it.

    Args:
        life: the first.
        line: to the supervisor.
        address: where groups meet.
        train: the train function.
        config: given to it.
        store: its directory.
        process: its number.
        gpus: what it computes on; None: the CPU.
    """
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=line.close)  # else it would outlive this process there
    device = gpus.take(process) if gpus is not None else torch.device("cpu")
    gc.freeze()
    lives: queue.SimpleQueue[_OneLife] = queue.SimpleQueue()
    run = (line, address, store, gpus.backend if gpus is not None else "gloo", device)
    now = _OneLife(life, *run)
    current = [now]

    def listen() -> None:
        try:
            while True:
                heard = line.recv()
                if isinstance(heard, Life):
                    current[0] = _OneLife(heard, *run)
                    lives.put(current[0])
                elif isinstance(heard, Disband):
                    current[0].member.processes.break_up()
                else:
                    _heed(heard, current[0].inbox, current[0].member)
        except (EOFError, OSError):
            os._exit(1)  # the supervisor is gone

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    while True:
        outcome, kept = now.run(train, config)
        now.link.tell(outcome)
        if outcome.kind is not OutcomeKind.FREE:
            leave()
            break
        del now
        let_go_of_memory()
        now = lives.get()
        if kept is not None and now.founds:
            now.member.found_from(kept)
        kept = None  # it is as large as the model and its optimizer
        let_go_of_memory()
    if outcome.kind in (OutcomeKind.LEFT, OutcomeKind.FINISHED):
        listener.join()  # others may still wait for what was sent to them
    line.close()
    os._exit(0)


def _heed(heard: Any, inbox: ThreadSafeInbox, member: Member) -> None:  # noqa: ANN401
    """What a worker is told."""
    if isinstance(heard, Membership):
        inbox.publish(heard)
    elif isinstance(heard, CatchUp):
        inbox.invite(heard.donors, shadow=heard.shadow)
    elif isinstance(heard, Dismiss):
        inbox.dismiss(QuorumLost(heard.reason))
    elif isinstance(heard, StoreSoon):
        inbox.store_soon()
    elif not isinstance(heard, Disband):
        member.saver.tell(heard)


def _listen(line: Connection, inbox: ThreadSafeInbox, member: Member) -> None:
    try:
        while True:
            _heed(line.recv(), inbox, member)
    except (EOFError, OSError):
        os._exit(1)  # the supervisor is gone


def _pulse(link: _PipeLink, member: Member) -> None:
    parts = Parts()
    member.on_phase(parts.phase)
    usage, measured = Usage(parts, member.device), time.monotonic()
    while not link.over:
        time.sleep(0.1)
        member.processes.look()
        try:
            link.send(link.heartbeat(member))
            if time.monotonic() - measured >= EVERY_S:
                measured = time.monotonic()
                link.send(Measured(usage.measure()))
        except OSError:
            return

"""One worker: a Ray actor that runs `train(ctx)` in one thread and listens in another.

Not here: anything about groups or samples (member), and any decision (controller).
"""

import contextlib
import gc
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import ray
import torch

from elastix.comm.network.door import Address
from elastix.comm.network.process_group import Backend, Wiring
from elastix.comm.protocol.membership import Membership
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.config import ProfileConfig
from elastix.errors import QuorumLost
from elastix.events import Event
from elastix.store import Store, StoreServer
from elastix.train.control.messages import (
    MUST_ARRIVE,
    CatchUp,
    Dismiss,
    FromWorker,
    Heartbeat,
    Leave,
    Measured,
    Outcome,
    OutcomeKind,
    Ready,
    RecordEvents,
    SawDeath,
    Started,
    ToWorker,
    WatchNeighbour,
)
from elastix.train.on_ray import affinity, lifeline
from elastix.train.on_ray.slots import SLOT, Slot
from elastix.train.on_ray.takeover import Presence, remove_groups, run_id
from elastix.train.replica.link import Settings
from elastix.train.replica.member import Member
from elastix.train.replica.outcome import run_train
from elastix.train.replica.profiler import Profiler
from elastix.train.replica.usage import EVERY_S, Parts, Usage

_PATIENCE_S = 5.0  # for an answer of the controller, before nobody is taken to lead the run
_AGAIN_S = 0.1
_ENDED_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker of a run is given.

    Attributes:
        train: the train function as ray.cloudpickle wrote it.
        store: where States are kept.
        address: of the Rendezvous.
        heartbeat_s: seconds between heartbeats.
        affinity: bind the worker to the cores of one NUMA node.
    """

    train: bytes
    config: Mapping[str, Any]
    settings: Settings
    store: str
    address: tuple[str, int]
    backend: Backend
    heartbeat_s: float
    threads: int
    affinity: bool = True
    profile: ProfileConfig | None = None


class ControllerLink:
    """The Link to the controller. Events are sent in batches by a thread of their own."""

    def __init__(self, worker: int, controller: Any, device: str, job: "Job") -> None:  # noqa: ANN401
        self.catch_up: Address | None = None
        self.lifeline = lifeline.hold()
        self.led = threading.Event()
        self.led.set()
        self._worker = worker
        self._store = job.store
        self._run = run_id(job.store, job.settings.run)
        self._controller = controller
        self._device = device
        self._events: queue.SimpleQueue[tuple[int | None, Event] | None] = queue.SimpleQueue()
        self._journaled = -1
        self._where = ("start", 0)
        self._passed = 0
        self._sender = threading.Thread(target=self._send, name="events", daemon=True)
        self._sender.start()

    def started(self) -> None:
        """Tell the controller where this worker is."""
        node = ray.get_runtime_context().get_node_id()
        self.send(Started(pid=os.getpid(), node=node, device=self._device, lifeline=self.lifeline))

    def heartbeat(self, member: Member) -> Heartbeat:
        """Where the member is."""
        name, detail = self._where
        return Heartbeat(
            generation=member.generation,
            step=member.step,
            call=member.call,
            phase=name,
            detail=detail,
            passed=self._passed,
            waiting=member.waiting,
            waited_s=member.waited_s,
        )

    def send(self, message: FromWorker) -> None:
        """See Link."""
        if isinstance(message, Ready):
            self.catch_up = message.address
        if isinstance(message, MUST_ARRIVE):
            self._insist(message)
        else:
            self._controller.hear.remote(self._worker, message)

    def emit(self, event: Event, sequence: int | None = None) -> None:
        """See Link."""
        self._events.put((sequence, event))

    def journaled(self) -> int:
        """See Link."""
        return self._journaled

    def phase(self, name: str, detail: int) -> None:
        """See Link."""
        self._where = (name, detail)
        self._passed += 1

    def await_controller(self) -> None:
        """See Link."""
        if not self.led.is_set():
            self.phase("leaderless", 0)
            self.led.wait()

    def open_store(self) -> Store:
        """See Link: packs are this worker's own, questions to the index go to the controller."""
        return StoreServer(self._controller, self._store).open()

    def close(self) -> None:
        """Wait until every event is in the journal."""
        self._events.put(None)
        self._sender.join()

    def beat(self, heartbeat: Heartbeat, patience_s: float) -> None:
        """A heartbeat; notices when nobody leads the run, and ends this process if for good."""
        try:
            known = ray.get(
                self._controller.hear.remote(self._worker, heartbeat), timeout=patience_s
            )
        except ray.exceptions.ActorDiedError:
            self._orphaned()
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            known = False
        if known:
            self.led.set()
        else:
            self.led.clear()

    def _insist(self, message: FromWorker) -> None:
        """Say it until a controller has heeded it; one that was killed may have or not."""
        while True:
            try:
                if ray.get(self._controller.hear.remote(self._worker, message)):
                    return
            except ray.exceptions.ActorDiedError:
                self._orphaned()
            except ray.exceptions.RayActorError:
                self.led.clear()
            time.sleep(_AGAIN_S)

    def _orphaned(self) -> None:
        """The run is over for good, and nobody else would end this process."""
        remove_groups(self._run, SLOT)  # the trainer's room is its own, or already the next one's
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone as well
            # Of a process that exits by itself Ray tells the driver that it has crashed.
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
            time.sleep(_ENDED_S)
        os._exit(1)

    def _send(self) -> None:
        while True:
            batch = [self._events.get()]
            while not self._events.empty():
                batch.append(self._events.get())
            entries = [entry for entry in batch if entry is not None]
            if entries:
                self._insist(RecordEvents(tuple(entries)))
                sequences = [sequence for sequence, _ in entries if sequence is not None]
                self._journaled = max([self._journaled, *sequences])
            if len(entries) < len(batch):
                return


class Worker:
    """The actor. `run` occupies its main thread; the other methods are for the controller."""

    def __init__(self, worker: int, controller: Any, job: Job, slot: Slot) -> None:  # noqa: ANN401
        self._worker = worker
        self._slot = slot
        self._device = ""
        self._link: ControllerLink | None = None
        self._outcome: Outcome | None = None
        self._over = threading.Event()
        self._controller = controller
        self._job = job
        self._address = job.address  # of the Rendezvous, until another controller has one
        self._inbox = ThreadSafeInbox()
        self._member: Member | None = None
        _on_notice(self._leave)  # here, since `run` is not in the main thread

    def _leave(self) -> None:
        if self._link is not None:
            self._link.send(Leave("notice"))
        else:  # nobody needs it yet
            self._controller.hear.remote(self._worker, Leave("notice"))

    def _saw_death(self, worker: int) -> None:
        """Any thread. If the controller cannot be reached it hears of the death from Ray."""
        self._controller.hear.remote(self._worker, SawDeath(worker))

    def __repr__(self) -> str:
        member = self._member
        run = self._job.settings.directory.name
        where = f"rank={member.rank} gen={member.generation}" if member else f"of {run}"
        return f"worker {self._worker} {where}"

    @ray.method(concurrency_group="control")
    def hear(self, message: ToWorker) -> None:
        """What the controller has to say. Runs beside `run`, and never blocks."""
        match message:
            case Membership():
                self._inbox.publish(message)
            case CatchUp():
                self._inbox.invite(message.donors, shadow=message.shadow)
            case WatchNeighbour():
                lifeline.watch(message.lifeline, partial(self._saw_death, message.worker))
            case Dismiss():
                self._inbox.dismiss(QuorumLost(message.reason))
            case _ if self._member is not None:
                self._member.saver.tell(message)

    @ray.method(concurrency_group="control")
    def adopt(self, address: tuple[str, int]) -> Presence:
        """There is a new controller, whose Rendezvous is there. What it needs to know."""
        self._address = address
        member = self._member  # after that: see _train
        return Presence(
            worker=self._worker,
            slot=self._slot,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            device=self._device,
            generation=member.adopted(address) if member else 0,
            catch_up=self._link.catch_up if self._link else None,
            holder=member is not None and member.holder,
            shadow=member is not None and member.shadow,
            lifeline=self._link.lifeline if self._link else "",
        )

    @ray.method(concurrency_group="outcome")
    def outcome(self) -> Outcome:
        """How `run` ended; waits until it has. May be asked by one controller after the other."""
        self._over.wait()
        return self._outcome or Outcome(kind=OutcomeKind.RAISED, summary="no outcome")

    def run(self) -> None:
        """Run the train function to its end, once, however many controllers ask. Never raises.

        The call of one that was killed may never have come; if it did, others wait behind it.
        """
        if self._over.is_set():
            return
        try:
            self._outcome = self._train()
        except BaseException as error:  # noqa: BLE001 - the border of the process: all is reported
            text = traceback.format_exc()
            self._outcome = Outcome(kind=OutcomeKind.RAISED, summary=repr(error), traceback=text)
        self._over.set()

    def _train(self) -> Outcome:
        if self._job.affinity:  # before any thread is started that computes
            affinity.bind(self._worker, 0 if torch.cuda.is_available() and _has_gpu() else None)
        torch.set_num_threads(self._job.threads)
        gc.freeze()  # a full collection would walk over all of torch, in the middle of a step
        device = torch.device("cuda" if torch.cuda.is_available() and _has_gpu() else "cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        link = ControllerLink(self._worker, self._controller, str(device), self._job)
        wiring = Wiring(
            address=self._address,
            interface=ray.util.get_node_ip_address(),
            backend=self._job.backend,
            me=self._worker,
            shared=self._job.settings.shared,
            secret=self._job.settings.secret,
        )
        member = Member(wiring, device, self._job.settings, self._inbox, link)
        self._device = str(device)
        self._link, self._member = link, member
        member.adopted(self._address)  # a controller that came meanwhile found no member
        profiler = self._profile(member)
        link.started()
        stop = threading.Event()
        pulse = threading.Thread(target=self._pulse, args=(member, link, stop), daemon=True)
        pulse.start()
        try:
            train = ray.cloudpickle.loads(self._job.train)
            outcome = run_train(train, member, self._job.config)
            member.saver.close()
        finally:
            stop.set()
            if profiler is not None:
                profiler.close()
        link.close()
        return outcome

    def _profile(self, member: Member) -> Profiler | None:
        if self._job.profile is None:
            return None
        profiler = Profiler(self._job.profile, self._job.settings.directory, self._worker)
        profiler.attach(member)
        return profiler

    def _pulse(self, member: Member, link: ControllerLink, stop: threading.Event) -> None:
        parts = Parts()
        member.on_phase(parts.phase)
        usage, measured = Usage(parts, member.device), time.monotonic()
        while not stop.wait(self._job.heartbeat_s):
            link.beat(link.heartbeat(member), _PATIENCE_S)
            if time.monotonic() - measured >= EVERY_S:
                measured = time.monotonic()
                link.send(Measured(usage.measure()))


def _on_notice(leave: Callable[[], None]) -> None:
    """The first SIGTERM is a notice, as from a scheduler that wants the node; another is meant."""

    def heed(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A thread of its own, since the one that was interrupted may hold any lock.
        threading.Thread(target=leave, name="notice", daemon=True).start()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, heed)


def _has_gpu() -> bool:
    return bool(ray.get_gpu_ids())

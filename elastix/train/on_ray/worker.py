"""One process of a run: a Ray actor that runs `train(ctx)` in one thread and listens in another.

It is a worker, once; or a place of a crew, and of another one when its worker is lost without it.

Not here: anything about groups or samples (member), and any decision (controller).
"""

import contextlib
import copy
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from elastix.comm.network import nccl
from elastix.comm.network.door import Address
from elastix.comm.network.process_group import Backend, Wiring
from elastix.comm.protocol.membership import Membership
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.config import ProfileConfig
from elastix.data.leaving import leave
from elastix.errors import QuorumLost
from elastix.events import Event, Span
from elastix.frozen_imports import import_frozen
from elastix.store import Store, StoreServer
from elastix.train.control.messages import (
    MUST_ARRIVE,
    CatchUp,
    Disband,
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
    StoreSoon,
    ToWorker,
    WatchNeighbour,
)
from elastix.train.on_ray import affinity, lifeline
from elastix.train.on_ray.given_device import given_device
from elastix.train.on_ray.placement import SLOT, Slot
from elastix.train.on_ray.takeover import Presence, remove_groups, run_id
from elastix.train.record.provenance import Installation, installation, other_code
from elastix.train.replica.context import Context
from elastix.train.replica.device_failures import is_device_failure
from elastix.train.replica.link import FollowersLink, Life, Link
from elastix.train.replica.member import Member
from elastix.train.replica.notice import on_notice
from elastix.train.replica.profiler import Profiler
from elastix.train.replica.train_function import let_go_of_memory, run_train
from elastix.train.replica.usage import EVERY_S, Parts, Usage
from elastix.train.replica.worker_state import KeptState

logger = logging.getLogger(__name__)
_PATIENCE_S = 5.0  # for an answer of the controller, before nobody is taken to lead the run
_AGAIN_S = 0.1
_ENDED_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every process of a run is given.

    Attributes:
        train: the train function as ray.cloudpickle wrote it.
        run: its name.
        directory: of the run.
        store: where States are kept.
        crew: workers are several processes each.
        shares_gpu: NCCL is to be told that each process is on a host of its own.
        address: of the Rendezvous.
        heartbeat_s: seconds between heartbeats.
        driver: the elastix that it has.
        affinity: bind the worker to the cores of one NUMA node.
    """

    train: bytes
    config: Mapping[str, Any]
    run: str
    directory: Path
    store: str
    crew: bool
    address: tuple[str, int]
    backend: Backend
    shares_gpu: bool
    heartbeat_s: float
    threads: int
    driver: Installation
    affinity: bool = True
    profile: ProfileConfig | None = None


class ControllerLink:
    """The Link to the controller. Events are sent in batches by a thread of their own."""

    def __init__(self, tell: Callable[[FromWorker], Any], process: "Worker", device: str) -> None:
        job = process.job
        self.catch_up: Address | None = None
        self.ready = False
        self.led = threading.Event()
        self.led.set()
        self._tell = tell
        self._lifeline = process.lifeline
        self._store = job.store
        self._run = run_id(job.store, job.run)
        self._controller = process.controller
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
        self.send(Started(pid=os.getpid(), node=node, device=self._device, lifeline=self._lifeline))

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
            self.catch_up, self.ready = message.address, True
        if isinstance(message, MUST_ARRIVE):
            self._insist(message)
        else:
            self._tell(message)

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
            known = ray.get(self._tell(heartbeat), timeout=patience_s)
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
                if ray.get(self._tell(message)):
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


class _Life:
    """What a process is of one worker, from the first word about it to its outcome."""

    def __init__(self) -> None:
        self.inbox = ThreadSafeInbox()
        self.disbanded = False
        self.founds = False
        self.left_out: Mapping[int, tuple[Span, ...]] | None = None  # as was told first
        self.device = ""
        self.link: ControllerLink | None = None
        self.member: Member | None = None
        self.outcome: Outcome | None = None


class Worker:
    """The actor. `run` occupies its main thread; the other methods are for the controller.

    Args:
        process: its number; that of its worker, if workers are single processes.
        controller: of the run.
        job: what to do.
        slot: where it runs.
    """

    def __init__(self, process: int, controller: Any, job: Job, slot: Slot) -> None:  # noqa: ANN401
        self.controller = controller
        self.job = job
        self.lifeline = ""
        self._process = process
        self._slot = slot
        self._address = job.address  # of the Rendezvous, until another controller has one
        self._news = threading.Condition()
        self._lives: dict[int, _Life] = {}  # by worker
        self._now = -1 if job.crew else process  # the worker that it is of, or was last
        self._place = 0
        self._warm = self._noticed = False
        self._kept: KeptState | None = None
        on_notice(self._leave)  # here, since `run` is not in the main thread

    def _tell(self, worker: int, message: FromWorker) -> Any:  # noqa: ANN401 - Ray's reference
        return self.controller.hear.remote(self._process, worker, message)

    def _life(self, worker: int) -> _Life:
        with self._news:
            return self._lives.setdefault(worker, _Life())

    def _leave(self) -> None:
        self._noticed = True
        worker = self._now
        if worker < 0:
            return  # of no worker yet
        link = self._life(worker).link
        if link is not None:
            link.send(Leave("notice"))
        else:  # nobody needs it yet
            self._tell(worker, Leave("notice"))

    def _saw_death(self, worker: int) -> None:
        """Any thread. If the controller cannot be reached it hears of the death from Ray."""
        self._tell(self._now, SawDeath(worker))

    def __repr__(self) -> str:
        life = self._lives.get(self._now)
        member = life.member if life is not None else None
        run = self.job.directory.name
        where = f"rank={member.rank} gen={member.generation}" if member else f"of {run}"
        if member is not None and member.settings.crew:
            return f"worker {member.me} place {self._place} {where}"
        return f"worker {self._process} {where}"

    @ray.method(concurrency_group="control")
    def hear(self, worker: int, message: ToWorker) -> None:
        """What the controller has to say to a worker. Runs beside `run`, and never blocks."""
        life = self._life(worker)
        match message:
            case Membership():
                life.inbox.publish(message)
            case CatchUp():
                life.inbox.invite(message.donors, shadow=message.shadow)
            case WatchNeighbour():
                lifeline.watch(message.lifeline, partial(self._saw_death, message.worker))
            case Dismiss():
                life.inbox.dismiss(QuorumLost(message.reason))
            case Disband():
                life.disbanded = True
                if life.member is not None:
                    life.member.processes.break_up()
            case StoreSoon():
                life.inbox.store_soon()
            case _ if life.member is not None:
                life.member.saver.tell(message)

    @ray.method(concurrency_group="control")
    def adopt(self, address: tuple[str, int], left_out: Mapping[int, tuple[Span, ...]]) -> Presence:
        """There is a new controller, whose Rendezvous is there. What it needs to know.

        Args:
            address: of that.
            left_out: what to go by if this process has not begun; its call to `run` may be on the
                way from the controller before.
        """
        self._address = address
        life = self._life(self._now) if self._now >= 0 else _Life()
        with self._news:
            if life.left_out is None:
                life.left_out = left_out
        member = life.member  # after that: see _train
        # Another controller takes none for the founder; so this process would go on from a State
        # of which the journal knows nothing.
        lost_founder = life.founds and not (member is not None and member.holder)
        lost_process = member is not None and member.processes.broken
        return Presence(
            process=self._process,
            worker=self._now,
            place=self._place,
            broken=life.disbanded or lost_process or lost_founder,
            slot=self._slot,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            device=life.device,
            generation=member.adopted(address) if member else 0,
            catch_up=life.link.catch_up if life.link else None,
            ready=life.link is not None and life.link.ready,
            holder=member is not None and member.holder,
            shadow=member is not None and member.shadow,
            operation=member.call[0] if member is not None else -1,
            lifeline=self.lifeline,
            noticed=self._noticed,
            left_out=life.left_out,
        )

    @ray.method(concurrency_group="outcome")
    def outcome(self, after: int) -> tuple[int, Outcome]:
        """The first worker after that one of which this process was, and how that ended.

        Waits until it has. May be asked by one controller after the other.
        """

        def over() -> list[tuple[int, Outcome]]:
            lives = sorted(self._lives.items())
            return [(w, one.outcome) for w, one in lives if one.outcome is not None and w > after]

        with self._news:
            self._news.wait_for(over)
            return over()[0]

    def run(self, life: Life) -> None:
        """Run the train function to its end, once, however many controllers ask. Never raises.

        The call of one that was killed may never have come; if it did, others wait behind it.
        """
        mine = self._life(life.worker)
        if mine.outcome is not None:
            return
        self._now, self._place, mine.founds = life.worker, life.place, life.founds
        with self._news:
            if mine.left_out is None:
                mine.left_out = life.settings.left_out
        life = replace(life, settings=replace(life.settings, left_out=mine.left_out))
        try:
            outcome = self._train(life, mine)
        except BaseException as error:  # noqa: BLE001 - the border of the process: all is reported
            text = traceback.format_exc()
            failed = is_device_failure(error)  # before the function began
            if failed:
                logger.warning("worker %d is lost, as its GPU failed: %r", life.worker, error)
            kind = OutcomeKind.DEVICE_FAILED if failed else OutcomeKind.RAISED
            outcome = Outcome(kind=kind, summary=repr(error), traceback=text)
        if outcome.kind is OutcomeKind.FREE:
            mine.member = mine.link = None  # nothing of it is needed any more
        with self._news:
            mine.outcome = outcome
            self._news.notify_all()
        if outcome.kind is OutcomeKind.FREE:
            let_go_of_memory()

    def _warm_up(self) -> None:
        """What is done once, before any thread is started that computes."""
        if self._warm:
            return
        self._warm = True
        if self.job.backend == "nccl":
            node = ray.get_runtime_context().get_node_id()
            nccl.settle_environment(f"{node}-{os.getpid()}" if self.job.shares_gpu else "")
        if self.job.affinity:
            affinity.bind(self._process, given_device().index)
        torch.set_num_threads(self.job.threads)
        import_frozen("torch._dynamo")  # making the first optimizer imports it, in most of a second
        self.lifeline = lifeline.hold()

    def _train(self, life: Life, mine: _Life) -> Outcome:
        node = ray.get_runtime_context().get_node_id()
        who = f"node {node} (of worker {life.worker})"
        refused = other_code(self.job.driver, installation(), who, node)
        if refused is not None:
            return Outcome(
                kind=OutcomeKind.OTHER_CODE, error=refused, summary=str(refused), node=node
            )
        self._warm_up()
        device = given_device()
        settings = life.settings
        link = ControllerLink(partial(self._tell, life.worker), self, str(device))
        wiring = Wiring(
            address=self._address,
            interface=ray.util.get_node_ip_address(),
            backend=self.job.backend,
            me=life.worker,
            shared=settings.shared,
            secret=settings.secret,
            place=life.place,
            device=device,
        )
        own: Link = FollowersLink(link) if life.place else link
        member = Member(wiring, settings, mine.inbox, own)
        if self._kept is not None and life.founds:
            member.found_from(self._kept)
        if self._kept is not None:
            self._kept = None  # it is as large as the model and its optimizer
            let_go_of_memory()
        mine.device = str(device)
        mine.link, mine.member = link, member
        member.adopted(self._address)  # a controller that came meanwhile found no member
        if mine.disbanded:  # before there was a member
            member.processes.break_up()
        profiler = self._profile(member)
        link.started()
        stop = threading.Event()
        pulse = threading.Thread(target=self._pulse, args=(member, link, stop), daemon=True)
        pulse.start()
        try:
            train, config = self._program()
            together = partial(member.processes.assemble, wiring)
            outcome = run_train(train, member, config, before=together)
            if outcome.kind is OutcomeKind.FREE:
                self._kept = member.disband()
                outcome = replace(outcome, kept=self._kept.told if self._kept else None)
            else:
                leave()  # before the controller hears that it may end this process
            member.saver.close()
        finally:
            stop.set()
            if profiler is not None:
                profiler.close()
        link.close()
        return outcome

    def _program(self) -> tuple[Callable[[Context], None], Mapping[str, Any]]:
        """The train function and its config, whatever it has done to both in an earlier life."""
        return ray.cloudpickle.loads(self.job.train), copy.deepcopy(self.job.config)

    def _profile(self, member: Member) -> Profiler | None:
        if self.job.profile is None:
            return None
        profiler = Profiler(self.job.profile, self.job.directory, self._process)
        profiler.attach(member)
        return profiler

    def _pulse(self, member: Member, link: ControllerLink, stop: threading.Event) -> None:
        parts = Parts()
        member.on_phase(parts.phase)
        usage, measured = Usage(parts, member.device), time.monotonic()
        while not stop.wait(self.job.heartbeat_s):
            member.processes.look()
            link.beat(link.heartbeat(member), _PATIENCE_S)
            if time.monotonic() - measured >= EVERY_S:
                measured = time.monotonic()
                link.send(Measured(usage.measure()))

"""Trials on persistent Ray workers, fed by one loop. The default executor.

Starting a process and importing torch takes seconds, a trial may take milliseconds; so workers
stay, and a trial costs one call of an actor. A trial of one worker runs right there
(in_process); one of several is an elastic group that a worker of the pool looks after
(group_worker).

Not here: what is worth running. Invariant: work whose worker died ends as "lost", at once; none is
given to a worker with other elastix code than this process has, or whose GPU fails for good.
"""

import contextlib
import logging
import math
import pickle
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import ray

from elastix.config import (
    CheckpointConfig,
    FailureConfig,
    ScalingConfig,
    refuse_crew,
    refuse_memory,
)
from elastix.data import leaving
from elastix.errors import ConfigError, Corrupt, ElastixError, OtherCode, SearchError, TooNew
from elastix.observe.journal import Tail
from elastix.observe.ray_death_messages import Deaths, GroupDeaths
from elastix.search.executors import trial_memory
from elastix.search.executors.executor import (
    CUT_SHORT,
    Ended,
    EndedKind,
    TrainFunction,
    Work,
    WorkReport,
)
from elastix.search.executors.failing_gpus import FailingGpus, may_be_the_program
from elastix.search.executors.group_worker import GroupWorker, journal_of
from elastix.search.executors.packer import Packer, Placement, Reserve
from elastix.search.executors.pool_worker import GIVEN_BACK, Hello, LoneWorker, packed
from elastix.search.executors.store_access import StoreAccess
from elastix.search.model_sources import StoreOpener
from elastix.train.on_ray.actor_classes import as_actor
from elastix.train.on_ray.find_ray import hold_ray, let_go_of_ray
from elastix.train.on_ray.pickled_train import pickle_train
from elastix.train.on_ray.placement import RefusedNodes, elsewhere
from elastix.train.on_ray.room import check_capacity, fit_on_nodes, how_to_make_room
from elastix.train.on_ray.worker_handle import WorkerHandle
from elastix.train.record.provenance import installation, other_code

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 0.5
_RECRUIT_EVERY_S = 2.0
_SHORT_S = 0.05
_VERY_SHORT_S = 0.005
_DEATHS_AT_START = 3
_AGAIN_S = 60.0  # after so many, if others are there
_NEAR_S = 1.0
_INTRODUCED_S = 10.0  # it reads all its modules
_LEAVING_S = 1.0


@dataclass
class _WorkerHandle:
    """A worker of the pool, as the loop sees it."""

    number: int
    actor: Any
    greeting: Any
    hello: Hello | None = None  # until it is ready
    awaited_s: float = field(default_factory=time.monotonic)
    inhand: deque["_Given"] = field(default_factory=deque)  # the first one is running
    asked: Any = None
    asked_of: "_Given | None" = None  # what it had in hand then
    asked_s: float = 0.0
    seen: int = 0
    begun_s: float = 0.0  # when the first one began, as far as is known here
    giving_back: Any = None  # the answer to that, while it is awaited
    group: tuple[Tail, GroupDeaths] | None = None  # of a trial of several workers
    group_began: bool = False  # as its journal tells

    @property
    def ready(self) -> bool:
        return self.hello is not None

    @property
    def first(self) -> "_Given | None":
        return self.inhand[0] if self.inhand else None


@dataclass(frozen=True)
class _Given:
    """Work that a worker has."""

    ref: Any
    work: Work
    placement: Placement
    turn: int = 0  # of all that were given out, by which it is halted, and not its trial's next run


class Pool:
    """Persistent workers.

    Args:
        scaling: what a trial occupies. With one worker it runs in a worker of the pool; with
            several, or a range, each trial is an elastic group of that size. What memory is kept
            free for a trial of one worker is `memory_per_worker`.
        parallel: trials at once; None: as many as the cluster has room for, also when it grows.
        checkpoint, failure: for trials that are groups, as for ElasticTrainer. A worker that
            answers nothing for the longer of `failure`'s hang_timeout_s and start_timeout_s is
            killed, and its trial is lost.
        store: directory where such groups keep their journals.
    """

    def __init__(
        self,
        *,
        scaling: ScalingConfig | None = None,
        parallel: int | None = None,
        checkpoint: CheckpointConfig | None = None,
        failure: FailureConfig | None = None,
        store: str = "runs/store",
    ) -> None:
        self._scaling = scaling or ScalingConfig()
        refuse_crew(self._scaling, "trials of a campaign")
        if self._scaling.max_workers > 1:
            refuse_memory(self._scaling, "trials that are groups")
        self._parallel = parallel
        self._checkpoint = checkpoint or CheckpointConfig()
        self._failure = failure or FailureConfig()
        self._store = str(Path(store).resolve())  # workers may be elsewhere
        self._train: Any = None
        self._handles: dict[int, _WorkerHandle] = {}
        self._next = 0
        self._turn = 0
        self._owns_ray = False
        self._recruited_s = 0.0
        self._opened_s = 0.0
        self._looked_s = 0.0
        self._deaths_at_start = 0
        self._usual_s = 1.0
        self._access = StoreAccess()
        self._deaths = Deaths()
        self._packer = Packer()
        self._reserve = Reserve(self._scaling.memory_per_worker)
        self._memory_is_there = False
        self._waiting: dict[int, Work] = {}  # until there is memory for them
        self._turned_back: list[Ended] = []
        self._kills: dict[str, int] = {}  # by node: those of which it is known whom they hit
        self._refused = RefusedNodes("campaign")
        self._gpus = FailingGpus()
        self._parked: dict[int, _WorkerHandle] = {}  # they hold GPUs that fail, or Ray gives these
        self._unfit: ElastixError | None = None  # why the last node, or GPU, was given up
        self._given_up: ElastixError | None = None  # as soon as all that has happened was told
        self._group_s = 0.0  # when a group ended last that had begun

    # ------------------------------------------------------------------ Executor

    def open(self, train: TrainFunction) -> None:
        """See Executor. Uses the Ray of this process, finds one, or starts a local one."""
        pickled = pickle_train(train)
        self._owns_ray = hold_ray()
        try:
            check_capacity(self._scaling)
        except ConfigError:
            self.close()
            raise
        self._train = ray.put(pickled)
        self._deaths.open()
        self._opened_s = time.monotonic()
        self._recruit()

    def reach(self, store: str) -> StoreOpener:
        """See Executor."""
        return self._access.reach(store)

    @property
    def room(self) -> int:
        """Idle workers; short work is also queued, so that none of them waits for us."""
        return self._packer.room(self._depth)

    @property
    def held_back(self) -> Collection[int]:
        """Numbers of work that waits for memory, or behind other work of its worker."""
        behind = (islice(handle.inhand, 1, None) for handle in self._handles.values())
        return self._waiting.keys() | {given.work.number for queue in behind for given in queue}

    @property
    def idle_bytes(self) -> int:
        """The most that a worker holds which runs nothing; 0: unknown, or on GPUs nothing."""
        return max((h.hello.idle_bytes for h in self._handles.values() if h.hello), default=0)

    def submit(self, work: Work) -> None:
        """See Executor. It begins as soon as there is memory for it."""
        if not any(handle.ready for handle in self._handles.values()):
            raise SearchError(f"the pool has no worker for trial {work.number} yet.")
        self._waiting[work.number] = work
        reserve = self._reserve.bytes_for(work.predicted_bytes, self.idle_bytes)
        wanted = work.memory_bytes or reserve
        self._packer.wait(work.number, wanted)
        self._place()

    def _place(self) -> None:
        """Hand out what there is memory for."""
        for placement in self._packer.place(self._depth):
            work = self._waiting.pop(placement.trial)
            handle = self._handles[placement.seat]
            self._turn += 1
            ref = handle.actor.run.remote(packed(work), self._turn, tuple(self._refused.nodes))
            if not handle.inhand:
                handle.begun_s = time.monotonic()
            handle.inhand.append(_Given(ref, work, placement, self._turn))
            if self._scaling.max_workers > 1:
                handle.group = Tail(journal_of(work, self._store)), GroupDeaths(self._deaths)
                _read_journal(handle)
                handle.group_began = False  # that was of its earlier runs

    def poll(self, timeout_s: float) -> Sequence[WorkReport | Ended]:
        """See Executor."""
        self._access.look()
        self._recruit()
        lost = self._ask()
        self._take_back()
        places = dict(self._places())
        patience_s = min(timeout_s, _ASK_EVERY_S)
        over, _ = ray.wait(list(places), timeout=patience_s, num_returns=1) if places else ([], [])
        if over:  # and whatever else there is by now
            places = dict(self._places(queued=True))
            over, _ = ray.wait(list(places), timeout=0, num_returns=len(places))
        happened: list[WorkReport | Ended] = [*self._turned_back, *lost]
        self._turned_back.clear()
        try:
            for ref, answer in zip(over, _answers(over), strict=True):
                handle = places[ref]
                if handle.number in self._handles:  # it may have been found dead a moment ago
                    happened += self._take(handle, ref, answer)
            self._place()
            self._check_start()
        except ElastixError as error:
            self._given_up = self._given_up or error
        if self._given_up is not None and not happened:
            raise self._given_up
        return happened

    def halt(self, number: int) -> None:
        """See Executor."""
        if self._packer.forget(number):
            work = self._waiting.pop(number)
            self._turned_back.append(Ended(number=work.number, kind=EndedKind.RETURNED))
        for handle in self._handles.values():
            for given in handle.inhand:
                if given.work.number == number:
                    handle.actor.halt.remote(given.turn)

    def close(self) -> None:
        """See Executor. Ctrl-C meanwhile cuts short what is waited for, and leaves nothing."""
        with contextlib.ExitStack() as then:
            if self._owns_ray:
                self._owns_ray = False
                then.callback(let_go_of_ray)
            then.callback(self._access.close)
            then.callback(self._deaths.close)
            then.callback(self._end_all)
            self._take_leave()

    def _take_leave(self) -> None:
        """Workers clear up what they share, as far as they answer."""
        told = {
            handle.actor.leave.remote(): handle for handle in self._handles.values() if handle.ready
        }
        if told:
            _, silent = ray.wait(list(told), num_returns=len(told), timeout=_LEAVING_S)
            cleared = [_end_silent(told[ref]) for ref in silent]
            elsewhere = [ref for ref in cleared if ref is not None]
            if elsewhere:
                ray.wait(elsewhere, num_returns=len(elsewhere), timeout=_LEAVING_S)
            leaving.clear(killed=bool(silent))

    def _end_all(self) -> None:
        for handle in (*self._handles.values(), *self._parked.values()):
            _end(handle)
        self._handles.clear()
        self._parked.clear()
        self._turned_back.clear()
        self._waiting.clear()
        self._packer = Packer()
        self._refused, self._gpus = RefusedNodes("campaign"), FailingGpus()
        self._unfit = self._given_up = None
        self._deaths_at_start = 0

    # ------------------------------------------------------------------ what comes back

    @property
    def _depth(self) -> int:
        """A round trip and a commit cost milliseconds: short work is queued meanwhile."""
        if self._scaling.max_workers > 1 or self._usual_s > _SHORT_S:
            return 1
        return 2 if self._usual_s > _VERY_SHORT_S else 8

    def _places(self, *, queued: bool = False) -> Sequence[tuple[Any, _WorkerHandle]]:
        """What may come, and from where; of the work of a worker the next, or all that it has."""
        found: list[tuple[Any, _WorkerHandle]] = []
        for handle in self._handles.values():
            if not handle.ready:
                found.append((handle.greeting, handle))
            refs = [given.ref for given in handle.inhand]
            found += [(ref, handle) for ref in (refs if queued else refs[:1])]
            asked = (handle.asked, handle.giving_back)
            found += [(ref, handle) for ref in asked if ref is not None]
        return found

    def _take(self, handle: _WorkerHandle, ref: Any, answer: Any) -> list[WorkReport | Ended]:  # noqa: ANN401
        if any(ref == queued.ref for queued in islice(handle.inhand, 1, None)):
            return []  # heard of before the one ahead of it; it comes again
        if isinstance(answer, ray.exceptions.RayActorError):
            return self._dead(handle, answer)
        if ref == handle.greeting:
            return self._meet(handle, answer)
        if ref == handle.asked:
            handle.asked = None
            # Work that has ended since has told all at its end, and may be about to run again; it
            # may also have begun since.
            same = handle.first is not None and handle.first is handle.asked_of
            if isinstance(answer, BaseException) or not same:
                return []
            handle.seen, told = answer
            return list(told)
        if ref == handle.giving_back:
            handle.giving_back = None
            return self._given_back(handle, answer)
        if answer == GIVEN_BACK:  # whichever of the two answers is heard of first
            turns = [given.turn for given in handle.inhand if given.ref == ref]
            return self._given_back(handle, turns)
        since = handle.begun_s
        ended = self._over(handle, answer)
        if isinstance(ended.error, OtherCode) and ended.error.node:  # one of its group is there
            self._avoid(ended.error.node, ended.error)
            said = handle.hello
            if said and said.node == ended.error.node:  # and so would its next controllers be
                self._let_go(handle)
            return [Ended(number=ended.number, kind=EndedKind.RETURNED)]
        if ended.kind is EndedKind.RETURNED and not self._any_group(since):
            raise SearchError(f"{ended.summary} No trial is lost: run() again goes on.")
        return self._retire(handle, ended) if ended.spent else [ended]

    def _any_group(self, since: float) -> bool:
        """Whether one is at work, and does not wait for room as well; or one was, since then."""
        at_work = [handle for handle in self._handles.values() if handle.inhand]
        for handle in at_work:
            _read_journal(handle)
        return self._group_s > since or any(handle.group_began for handle in at_work)

    def _meet(self, handle: _WorkerHandle, answer: Any) -> list[WorkReport | Ended]:  # noqa: ANN401
        """A worker says who it is, or what became of that."""
        who = f"of worker {handle.number}"
        if isinstance(answer, BaseException):  # nobody knows yet which elastix it has
            try:
                asked = handle.actor.__ray_call__.remote(_introduction())
                node, has = ray.get(asked, timeout=_INTRODUCED_S)
            except ray.exceptions.RayError:
                return self._dead(handle, answer)
            cause = getattr(answer, "cause", answer)  # of what it raised itself
            failed = f"node {node} ({who}) cannot run trials: {cause!r}"
        else:
            node, has, failed = answer.node, getattr(answer, "installation", None), ""
        other = other_code(installation(), has, f"node {node} ({who})", node)
        if other is not None:
            self._let_go(handle)
            self._avoid(node, other)
        elif failed:  # which may have been for once: another process may come up there
            return self._dead(handle, SearchError(failed))
        elif trial_memory.out_of_memory(answer.failed):  # by others: it is full, and not broken
            return self._dead(handle, SearchError(answer.failed))
        elif answer.failed:
            self._park(handle, answer)
        else:
            self._welcome(handle, answer)
        return []

    def _given_back(self, handle: _WorkerHandle, answer: Any) -> list[WorkReport | Ended]:  # noqa: ANN401
        """What was queued there and has not begun is as if it had never been given out."""
        turns = [] if isinstance(answer, BaseException) else answer
        back = [given for given in handle.inhand if given.turn in turns]
        for given in back:
            handle.inhand.remove(given)
            self._packer.end(given.work.number)
        return [Ended(number=given.work.number, kind=EndedKind.RETURNED) for given in back]

    def _over(self, handle: _WorkerHandle, value: Any) -> Ended:  # noqa: ANN401
        given = handle.inhand.popleft()
        work = given.work
        self._packer.end(work.number)
        _read_journal(handle)
        if handle.group_began:
            self._group_s = time.monotonic()
        handle.asked_s = handle.begun_s = time.monotonic()
        if isinstance(value, bytes):
            ended: Ended = pickle.loads(value)
            if handle.hello is not None and not ended.spent:
                self._gpus.worked(handle.hello.host)
            seconds = ended.finished_s - ended.started_s
            self._usual_s = 0.7 * min(self._usual_s, 1.0) + 0.3 * seconds
            if ended.kind not in CUT_SHORT:  # there it had not all that it needs
                self._reserve.learn(
                    predicted=work.predicted_bytes,
                    base=ended.base_bytes,
                    peak=ended.peak_bytes,
                    idle=handle.hello.idle_bytes if handle.hello else 0,
                )
            placed = given.placement
            return replace(ended, reserved_bytes=placed.reserved, alone=placed.alone)
        if not isinstance(value, ray.exceptions.RayTaskError):  # its answer went with its node
            return Ended(number=work.number, kind=EndedKind.LOST, summary=str(value))
        return Ended(  # the call itself failed: its arguments or its answer cannot be sent
            number=work.number,
            kind=EndedKind.RAISED,
            summary=str(value.cause),
            traceback=str(value),
        )

    def _let_go(self, handle: _WorkerHandle) -> None:
        """It is no worker of this pool any more, and its process ends."""
        del self._handles[handle.number]
        self._packer.leave(handle.number)
        _end(handle)

    def _dead(
        self, handle: _WorkerHandle, error: BaseException, *, silent: bool = False
    ) -> list[WorkReport | Ended]:
        """Its first work is lost with it, what was queued is not: that goes to others.

        Nor is the first, if it came when the worker was `silent` already.
        """
        self._let_go(handle)
        said = handle.hello
        if said is None:
            self._died_at_start(error)
        elif handle.inhand or silent:  # the campaign tells which trial was lost
            self._deaths.told(said.node, said.pid)
        in_hand = said if handle.inhand and not silent else None
        starved = in_hand is not None and self._was_starved(in_hand, error)
        if self._deaths_at_start < _DEATHS_AT_START:
            self._spawn()
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        if starved:
            cause = f"the system ended its worker for want of memory: {cause}"
        # One that was alone may have been the victim of somebody else's process.
        alone = all(given.placement.alone for given in islice(handle.inhand, 1))
        first = EndedKind.STARVED if starved and not alone else EndedKind.LOST
        if silent and handle.begun_s > handle.asked_s:
            first = EndedKind.RETURNED
        if silent and (first is EndedKind.RETURNED or not handle.inhand):
            logger.warning("%s, was ended and is replaced; no trial is lost", error)
        return [
            Ended(
                number=given.work.number,
                kind=EndedKind.RETURNED if place else first,
                summary=cause,
                worker="" if silent else f"worker {handle.number}",  # it did not die by itself
                reserved_bytes=given.placement.reserved,
                alone=given.placement.alone,
            )
            for place, given in enumerate(handle.inhand)
        ]

    def _died_at_start(self, error: BaseException) -> None:
        """Who is there goes on without further ones, of which one is tried now and then.

        Raises:
            SearchError: several in a row, and nobody is there or on the way.
        """
        self._deaths_at_start += 1
        if self._deaths_at_start < _DEATHS_AT_START:
            return
        self._unfit = SearchError(
            f"{self._deaths_at_start} workers in a row died while they started, the last "
            f"one of: {error}. The pool was given up. Look at the workers' logs; an "
            "import that crashes, another elastix, too little memory and a GPU that fails are the "
            "usual causes."
        )
        if not self._handles:
            raise self._unfit from error
        if self._deaths_at_start == _DEATHS_AT_START:
            logger.warning(
                "%d workers in a row died while they started, the last one of: %s. The campaign "
                "goes on with the others, and tries again each %.0f s",
                *(self._deaths_at_start, error, _AGAIN_S),
            )

    def _retire(self, handle: _WorkerHandle, ended: Ended) -> list[WorkReport | Ended]:
        """Its process can compute nothing any more: another takes its place, and what is queued."""
        said = handle.hello
        queued = [given.work.number for given in handle.inhand]
        told = f"{ended.summary}\n{ended.traceback}"
        broken = ended.kind is EndedKind.LOST and not may_be_the_program(told)
        if said and broken and self._gpus.failed(said.host, handle.number, ended.number):
            self._park(handle, replace(said, failed=ended.summary))
            back = [ended.number, *queued]
            return [Ended(number=number, kind=EndedKind.RETURNED) for number in back]
        logger.warning(
            "worker %d is replaced, as its GPU does nothing any more for its process",
            handle.number,
        )
        self._let_go(handle)
        self._spawn()
        return [ended, *(Ended(number=number, kind=EndedKind.RETURNED) for number in queued)]

    def _park(self, handle: _WorkerHandle, said: Hello) -> None:
        """Its GPU fails for good. It stays, idle: Ray would give that GPU to the next one."""
        del self._handles[handle.number]
        self._packer.leave(handle.number)
        handle.hello = said
        if all(said.host != other.hello.host for other in self._parked.values() if other.hello):
            logger.error("%s is given no trial any more: %s", said.host, said.failed)
        self._parked[handle.number] = handle
        self._unfit = SearchError(
            f"all GPUs fail that trials could have, the last one with: {said.failed}. No trial is "
            "lost. Look at that with nvidia-smi; run() again goes on."
        )

    def _welcome(self, handle: _WorkerHandle, said: Hello) -> None:
        """A worker is ready."""
        handle.hello = said
        self._deaths.expect(said.node, said.pid)
        self._gpus.begin(said.host, handle.number)
        self._deaths_at_start = self._refused.in_row = 0
        self._kills.setdefault(said.node, said.kills)
        self._packer.enter(
            handle.number,
            said.host,
            idle=said.idle_bytes,
            capacity=said.capacity_bytes,
            expected=self._expected(),
        )
        self._check_memory()

    def _avoid(self, node: str, why: ElastixError) -> None:
        """What is sent from there could be taken for something else: nobody is started there."""
        if self._refused.add(node):
            logger.warning("%s", why)
        self._unfit = why

    def _check_memory(self) -> None:
        """Once workers of all nodes are here, or all workers.

        Raises:
            ConfigError: no host has what is to be kept free for each trial.
        """
        wanted, ready = self._scaling.memory_per_worker, self._hellos
        there = len({h.node for h in ready}) >= self._nodes() or len(ready) == len(self._handles)
        if not isinstance(wanted, int) or self._memory_is_there or not there:
            return
        largest = max(said.capacity_bytes for said in ready)
        if 0 < largest < wanted:  # 0: unknown
            raise ConfigError(
                f"memory_per_worker={wanted} can never be kept free: workers may hold {largest} "
                "bytes on the largest host. No trial is lost. Give less, or None for an equal "
                "part of the host."
            )
        self._memory_is_there = True

    @property
    def _hellos(self) -> list[Hello]:
        return [handle.hello for handle in self._handles.values() if handle.hello]

    def _was_starved(self, said: Hello, error: BaseException) -> bool:
        """Whether the system, or Ray, ended a worker for want of memory."""
        if trial_memory.out_of_memory(str(error)):
            return True
        now = self._kills_near(said)
        before = self._kills[said.node]
        self._kills[said.node] += now > before
        return now > before

    def _kills_near(self, said: Hello) -> int:
        """How often the system has done so on the node of a worker that is gone.

        A worker that is left there says it; where none is, this process can only say it of its
        own node.
        """
        near = [h for h in self._handles.values() if h.hello and h.hello.node == said.node]
        try:
            if near:
                return int(ray.get(near[0].actor.kills.remote(), timeout=_NEAR_S))
            if said.node == ray.get_runtime_context().get_node_id():
                return trial_memory.kills()
        except ray.exceptions.RayError as error:
            logger.warning("kills for want of memory are not known node=%s: %s", said.node, error)
        return said.kills

    def _ask(self) -> list[WorkReport | Ended]:
        """Ask workers what was reported; those that are silent are lost.

        Also who is idle: one that is stopped is not to be given one trial after the other.
        """
        now, lost = time.monotonic(), list[WorkReport | Ended]()
        limit_s = max(self._failure.hang_timeout_s, self._failure.start_timeout_s)
        away_s, self._looked_s = now - self._looked_s, now
        for handle in list(self._handles.values()):
            if handle.asked is not None and away_s > limit_s / 2:
                # Nobody has looked whether it has answered. A part counts: it may always be so.
                handle.asked_s = min(now, handle.asked_s + away_s - limit_s / 4)
            if handle.asked is not None and now - handle.asked_s > limit_s:
                _end_silent(handle)
                told = f"worker {handle.number} answered nothing for {limit_s:g} s"
                lost += self._dead(handle, SearchError(told), silent=True)
            elif handle.ready and handle.asked is None and now - handle.asked_s > _ASK_EVERY_S:
                handle.asked_s, handle.asked_of = now, handle.first
                handle.asked = handle.actor.reports.remote(handle.seen)
                _read_journal(handle)
        return lost

    def _take_back(self) -> None:
        """Work behind a run that was taken for short, and is not, goes to a worker that is idle."""
        if self._waiting or all(handle.inhand for handle in self._handles.values()):
            return
        now = time.monotonic()
        for handle in self._handles.values():
            behind = [*islice(handle.inhand, 1, None)]
            late = behind and handle.giving_back is None and now - handle.begun_s > _SHORT_S
            if late and self._packer.idle_for(behind[0].placement.reserved):
                turns = [given.turn for given in behind]
                handle.giving_back = handle.actor.give_back.remote(turns)

    # ------------------------------------------------------------------ workers

    def _expected(self) -> int:
        """How many workers share a host's memory, or a GPU's, once all are there."""
        if self._scaling.gpus_per_worker > 0:
            return max(1, int(1 / self._scaling.gpus_per_worker + 1e-9))
        return math.ceil(self._wanted() / max(1, self._nodes()))

    def _nodes(self) -> int:
        """How many may have workers."""
        there = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return sum(node not in self._refused.nodes for node in there)

    @property
    def _fit(self) -> int:
        """Trials at once for which there is room on nodes that are not avoided, and on GPUs."""
        fit = fit_on_nodes(self._scaling, self._refused.nodes)
        if self._parked:
            there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            fit -= sum(h.hello.node in there for h in self._parked.values() if h.hello)
        return fit // self._scaling.min_workers

    @property
    def _would_fit(self) -> bool:
        """Whether there would be room for one if nothing were avoided: else nodes are gone."""
        return fit_on_nodes(self._scaling) >= self._scaling.min_workers

    def _at_work(self) -> bool:
        """Whether somebody is there who can run trials; a group may have no room."""
        groups = self._scaling.max_workers > 1
        return bool(self._hellos) and (not groups or self._any_group(time.monotonic()))

    def _wanted(self) -> int:
        most = max(1, self._fit)
        if self._parallel is None:
            return most
        return min(self._parallel, most) if self._refused.too_many else self._parallel

    def _recruit(self) -> None:
        now = time.monotonic()
        every_s = _RECRUIT_EVERY_S if self._deaths_at_start < _DEATHS_AT_START else _AGAIN_S
        if self._handles and now - self._recruited_s < every_s:
            return
        self._recruited_s = now
        for _ in range(self._wanted() - len(self._handles)):
            self._spawn()

    def _spawn(self) -> None:
        number = self._next
        self._next += 1
        options: dict[str, Any] = {"max_restarts": 0, "scheduling_strategy": "SPREAD"}
        if self._refused.nodes:
            options["label_selector"] = elsewhere(self._refused.nodes)
        actor: Any
        if self._scaling.max_workers > 1:
            actor = (
                as_actor(GroupWorker, control=2)
                .options(num_cpus=0, **options)
                .remote(
                    number, self._train, self._scaling, self._checkpoint, self._failure, self._store
                )
            )
        else:
            actor = (
                as_actor(LoneWorker, control=2)
                .options(
                    num_cpus=self._scaling.cpus_per_worker,
                    num_gpus=self._scaling.gpus_per_worker,
                    **options,
                )
                .remote(number, self._train, max(1, int(self._scaling.cpus_per_worker)))
            )
        self._handles[number] = _WorkerHandle(number, actor, actor.hello.remote())

    def _check_start(self) -> None:
        """Whether workers come. Who does not is replaced, as it may be stopped."""
        now, limit_s = time.monotonic(), self._failure.start_timeout_s
        late = [h for h in self._handles.values() if not h.ready and now - h.awaited_s > limit_s]
        if ready := len(self._hellos):
            self._opened_s = now
            room = bool(late) and ready < self._fit  # else they wait for it, as others would
            for handle in late:
                handle.awaited_s = now  # to ask Ray for its nodes takes a while
                if room:
                    self._let_go(handle)
                    self._recruited_s = 0.0  # at once
        if self._unfit is not None and not self._fit and self._would_fit and not self._at_work():
            raise self._unfit
        if not ready and now - self._opened_s > limit_s:
            raise SearchError(
                f"no worker of the pool was ready within start_timeout_s={limit_s:g}; free are "
                f"{ray.available_resources()}. Nothing is lost. {how_to_make_room()}"
            ) from self._unfit


def _answers(refs: list[Any]) -> list[Any]:
    """What the calls gave, or the error in its place. All at once, unless one of them failed."""
    try:
        return list(ray.get(refs)) if refs else []
    except ray.exceptions.RayError:
        return [_answer(ref) for ref in refs]


def _answer(ref: Any) -> Any:  # noqa: ANN401 - of any call
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        return error


def _introduction() -> Any:  # noqa: ANN401 - for __ray_call__
    """Asks a worker of any elastix who it is. It travels as code: that one may not have it."""

    def introduce(_worker: object) -> tuple[str, Any]:
        try:
            from elastix.train.record.provenance import installation
        except ImportError:
            return ray.get_runtime_context().get_node_id(), None
        return ray.get_runtime_context().get_node_id(), installation()

    return introduce


def _read_journal(handle: _WorkerHandle) -> None:
    """That its group has begun, and whose death within it is told of: Ray need not."""
    if handle.group is not None:
        tail, group = handle.group
        with contextlib.suppress(Corrupt, TooNew, OSError):
            for event in tail.news():
                handle.group_began = True
                group.hear(event)


def _end(handle: _WorkerHandle) -> None:
    ray.kill(handle.actor, no_restart=True)


def _end_silent(handle: _WorkerHandle) -> ray.ObjectRef[Any] | None:
    """End one that may be stopped; what comes when there is nothing left of it elsewhere."""
    said = handle.hello
    if said is None:
        return None
    worker = WorkerHandle(handle.number, handle.actor, handle.greeting, said.pid, said.node)
    return worker.kill()

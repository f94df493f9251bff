"""Trials on persistent Ray workers, fed by one loop. The default executor.

Starting a process and importing torch takes seconds, a trial may take milliseconds; so workers
stay, and a trial costs one call of an actor. A trial of one worker runs right there (alone.py);
a trial of several is an elastic group that a worker of the pool looks after (group.py).

Not here: what is worth running. Invariant: work whose worker died ends as "lost", at once.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import ray

from elastix.config import CheckpointConfig, FailureConfig, ScalingConfig
from elastix.errors import ConfigError, SearchError
from elastix.observe.deaths import Deaths
from elastix.search.executors.group import GroupWorker
from elastix.search.executors.seat import PoolWorker
from elastix.search.executors.work import Ended, Progress, TrainFunction, Work
from elastix.search.heritage import Opens, Shelf
from elastix.store.server import StoreServer
from elastix.train.trainer import fit_on_nodes, pickle_train

_ASK_EVERY_S = 0.5
_RECRUIT_EVERY_S = 2.0
_SHORT_S = 0.05
_VERY_SHORT_S = 0.005
_DEATHS_AT_START = 3


@dataclass
class _Seat:
    """A worker of the pool, as the loop sees it."""

    number: int
    actor: Any
    hello: Any
    process: tuple[str, int] | None = None  # its node's id and its own; None until it is ready
    inhand: deque[tuple[Any, Work]] = field(default_factory=deque)  # the first one is running
    asked: Any = None
    asked_s: float = 0.0
    seen: int = 0

    @property
    def ready(self) -> bool:
        return self.process is not None


class Pool:
    """Persistent workers.

    Args:
        scaling: what a trial occupies. With one worker it runs in a worker of the pool; with
            several, or a range, each trial is an elastic group of that size.
        parallel: trials at once; None: as many as the cluster has room for, also when it grows.
        checkpoint, failure: for trials that are groups, as for ElasticTrainer.
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
        self._parallel = parallel
        self._checkpoint = checkpoint or CheckpointConfig()
        self._failure = failure or FailureConfig()
        self._store = store
        self._train: Any = None
        self._seats: dict[int, _Seat] = {}
        self._next = 0
        self._owns_ray = False
        self._recruited_s = 0.0
        self._opened_s = 0.0
        self._deaths_at_start = 0
        self._usual_s = 1.0
        self._server: StoreServer | None = None
        self._deaths = Deaths()

    # ------------------------------------------------------------------ Executor

    def open(self, train: TrainFunction) -> None:
        """See Executor. Uses the Ray of this process, finds one, or starts a local one."""
        pickled = pickle_train(train)
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(logging_level=logging.WARNING)
        try:
            self._check_capacity()
        except ConfigError:
            self.close()
            raise
        self._train = ray.put(pickled)
        self._deaths.open()
        self._opened_s = time.monotonic()
        self._recruit()

    def reach(self, store: str) -> Opens:
        """See Executor."""
        found = reach(store)
        self._server = found if isinstance(found, StoreServer) else None
        return found

    @property
    def room(self) -> int:
        """Idle workers; short work is also queued, so that none of them waits for us."""
        depth = self._depth
        return sum(max(0, depth - len(seat.inhand)) for seat in self._seats.values() if seat.ready)

    def submit(self, work: Work) -> None:
        """See Executor."""
        ready = [seat for seat in self._seats.values() if seat.ready]
        if not ready:
            raise SearchError(f"the pool has no worker for trial {work.number} yet.")
        seat = min(ready, key=lambda each: len(each.inhand))
        seat.inhand.append((seat.actor.run.remote(work), work))

    def poll(self, timeout_s: float) -> Sequence[Progress | Ended]:
        """See Executor."""
        self._recruit()
        self._ask()
        places = dict(self._places())
        patience_s = min(timeout_s, _ASK_EVERY_S)
        over, _ = ray.wait(list(places), timeout=patience_s, num_returns=1) if places else ([], [])
        if over:  # and whatever else there is by now
            places = dict(self._places(queued=True))
            over, _ = ray.wait(list(places), timeout=0, num_returns=len(places))
        happened: list[Progress | Ended] = []
        for ref in over:
            seat = places[ref]
            if seat.number in self._seats:  # it may have been found dead a moment ago
                happened += self._take(seat, ref)
        self._check_start()
        return happened

    def halt(self, number: int) -> None:
        """See Executor."""
        for seat in self._seats.values():
            if any(work.number == number for _, work in seat.inhand):
                seat.actor.halt.remote(number)

    def close(self) -> None:
        """See Executor."""
        for seat in self._seats.values():
            _end(seat)
        self._seats.clear()
        self._deaths.close()
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    # ------------------------------------------------------------------ what comes back

    @property
    def _depth(self) -> int:
        """A round trip and a sync of the book cost milliseconds: short work is queued meanwhile."""
        if self._scaling.max_workers > 1 or self._usual_s > _SHORT_S:
            return 1
        return 2 if self._usual_s > _VERY_SHORT_S else 8

    def _places(self, *, queued: bool = False) -> Sequence[tuple[Any, _Seat]]:
        """What may come, and from where; of the work of a worker the next, or all that it has."""
        found: list[tuple[Any, _Seat]] = []
        for seat in self._seats.values():
            if not seat.ready:
                found.append((seat.hello, seat))
            refs = [ref for ref, _ in seat.inhand]
            found += [(ref, seat) for ref in (refs if queued else refs[:1])]
            if seat.asked is not None:
                found.append((seat.asked, seat))
        return found

    def _take(self, seat: _Seat, ref: Any) -> list[Progress | Ended]:  # noqa: ANN401
        if ref in [queued for queued, _ in islice(seat.inhand, 1, None)]:
            return []  # heard of before the one ahead of it; it comes again
        try:
            value = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            return self._dead(seat, error)
        except ray.exceptions.RayTaskError as error:
            if ref == seat.hello:
                return self._dead(seat, error)
            value = error
        if ref == seat.hello:
            seat.process = value
            self._deaths.expect(*value)
            self._deaths_at_start = 0
            return []
        if ref == seat.asked:
            seat.asked = None
            if isinstance(value, BaseException):
                return []
            seat.seen, told = value
            return list(told)
        return [self._over(seat, value)]

    def _over(self, seat: _Seat, value: Any) -> Ended:  # noqa: ANN401
        _, work = seat.inhand.popleft()
        seat.asked_s = time.monotonic()
        if isinstance(value, Ended):
            seconds = value.finished_s - value.started_s
            self._usual_s = 0.7 * min(self._usual_s, 1.0) + 0.3 * seconds
            return value
        return Ended(  # the call itself failed: its arguments or its answer cannot be sent
            number=work.number, kind="raised", summary=str(value.cause), traceback=str(value)
        )

    def _dead(self, seat: _Seat, error: BaseException) -> list[Progress | Ended]:
        """Its first work is lost with it, what was queued is not: that goes to others."""
        del self._seats[seat.number]
        _end(seat)
        if seat.process is None:
            self._deaths_at_start += 1
            if self._deaths_at_start >= _DEATHS_AT_START:
                raise SearchError(
                    f"{self._deaths_at_start} workers in a row died while they started, the last "
                    f"one of: {error}. The pool was given up. Look at the workers' logs; an "
                    "import that crashes and too little memory are the usual causes."
                ) from error
        elif seat.inhand:  # the campaign tells which trial was lost
            self._deaths.told(*seat.process)
        self._spawn()
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [
            Ended(
                number=work.number,
                kind="returned" if place else "lost",
                summary=cause,
                worker=f"worker {seat.number}",
            )
            for place, (_, work) in enumerate(seat.inhand)
        ]

    def _ask(self) -> None:
        """Ask workers that are long at it what was reported."""
        now = time.monotonic()
        for seat in self._seats.values():
            if seat.inhand and seat.asked is None and now - seat.asked_s > _ASK_EVERY_S:
                seat.asked_s = now
                seat.asked = seat.actor.reports.remote(seat.seen)

    # ------------------------------------------------------------------ workers

    def _check_capacity(self) -> None:
        if fit_on_nodes(self._scaling) >= self._scaling.min_workers:
            return
        has = ray.cluster_resources()
        raise ConfigError(
            f"a trial with num_workers={self._scaling.num_workers} and "
            f"{self._scaling.resources_per_worker} for each can never be placed: the cluster has "
            f"{has.get('CPU', 0):g} CPU and {has.get('GPU', 0):g} GPU. Nothing was started. Ask "
            "for less, or for a fraction of a CPU or GPU (cpus_per_worker=0.5)."
        )

    def _wanted(self) -> int:
        most = max(1, fit_on_nodes(self._scaling) // self._scaling.min_workers)
        return most if self._parallel is None else self._parallel

    def _recruit(self) -> None:
        now = time.monotonic()
        if self._seats and now - self._recruited_s < _RECRUIT_EVERY_S:
            return
        self._recruited_s = now
        for _ in range(self._wanted() - len(self._seats)):
            self._spawn()

    def _spawn(self) -> None:
        number = self._next
        self._next += 1
        options: Mapping[str, Any] = {"max_restarts": 0, "scheduling_strategy": "SPREAD"}
        groups = {"control": 2}
        actor: Any
        if self._scaling.max_workers > 1:
            group = ray.remote(concurrency_groups=groups)(GroupWorker)  # type: ignore[call-overload]
            actor = group.options(num_cpus=0, **options).remote(
                number, self._train, self._scaling, self._checkpoint, self._failure, self._store
            )
        else:
            alone = ray.remote(concurrency_groups=groups)(PoolWorker)  # type: ignore[call-overload]
            actor = alone.options(
                num_cpus=self._scaling.cpus_per_worker,
                num_gpus=self._scaling.gpus_per_worker,
                **options,
            ).remote(number, self._train, max(1, int(self._scaling.cpus_per_worker)))
        self._seats[number] = _Seat(number, actor, actor.hello.remote())

    def _check_start(self) -> None:
        limit_s = self._failure.start_timeout_s
        if any(seat.ready for seat in self._seats.values()):
            self._opened_s = time.monotonic()
        elif time.monotonic() - self._opened_s > limit_s:
            raise SearchError(
                f"no worker of the pool was ready within start_timeout_s={limit_s:g}; free are "
                f"{ray.available_resources()}. Nothing is lost. Stop what else runs on the "
                "cluster, or wait longer."
            )


def reach(store: str) -> Opens:
    """Workers on one host share a directory; on several, an actor owns the index."""
    hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if len(hosts) == 1 and "://" not in store:
        return Shelf(store)
    return StoreServer.start(store)


def _end(seat: _Seat) -> None:
    ray.kill(seat.actor, no_restart=True)

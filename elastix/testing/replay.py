"""Law 2: one process, fed the committed batches of a journal, ends with the same weights.

    python -m elastix.testing.replay runs/store/runs/NAME

The run's own train function is run again in threads that move in step, one for each share of a
batch. Nothing of elastix.comm takes part, and no loader: who was in the group, what failed, and
what was owed shows only in the journal. So this checks reducer, recovery and cursor at once, on
any job.

Gradients are summed up with plain arithmetic, each backward pass on its own: it is about the
batches drawn since the pass before it (or, if there are none, about the same as that one), and a
thread's gradient counts by its part of their committed samples, as far as those who had them are
still there. Buffers follow their gradients.

A batch in slices is replayed by one thread, slice by slice, each from the buffers of the step's
beginning: whoever computed one gave the same.

With `whole`, one thread reads every committed batch whole, and nothing is weighed: what plain torch
gives. It needs a model without batch norm, whose statistics are those of a share, and a train
function that does not go on with a batch after a worker's share of it was lost.

A train function with dropout or other random numbers gives other weights; that is its nature. Of a
run with exact=True it gives the same bytes (exact_replay).
"""

import argparse
import math
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from elastix import state_entries
from elastix.data.cursor import count, merge, split, subtract
from elastix.data.rehearsal import Rehearsal
from elastix.data.source import Collate, Source, to_device
from elastix.errors import ConfigError, ElastixError, TrainError
from elastix.events import (
    BatchShares,
    Event,
    LoaderOpened,
    RunStarted,
    Span,
    StateStored,
    TensorsInherited,
)
from elastix.observe import journal
from elastix.state import State, Stateful, capture, warm_start
from elastix.store import Store
from elastix.testing.exact_replay import Recorded, differing, higher
from elastix.testing.replayed_steps import (
    ReplayedStep,
    check_order,
    last_stored,
    left_out,
    loaders_of,
    standing,
    steps_of,
    weights,
    whole_step,
)
from elastix.train.replica.context import Context
from elastix.train.replica.evaluation import Metric, evaluating, measure
from elastix.train.replica.learning_rate import RateScaling
from elastix.train.replica.rounds import share_loss

_TIMEOUT_S = 600.0


class _Over(BaseException):
    """Every committed step is replayed."""


@dataclass(frozen=True)
class Difference:
    """How far the replay is from the run.

    Attributes:
        steps: steps replayed.
        worst: name of the tensor that differs most.
        relative: its largest difference over its largest value; of an exact run 0, or infinite.
        apart: of an exact run, the names of all that has other bytes; None for others.
    """

    steps: int
    worst: str
    relative: float
    apart: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if self.apart is None:
            return f"largest relative difference {self.relative:.2e}, in {self.worst}"
        return f"other bytes in {', '.join(self.apart)}" if self.apart else "to the last bit"


def replay(
    directory: Path,
    store: Path | None = None,
    device: str = "cpu",
    *,
    whole: bool = False,
    until: int | None = None,
) -> State:
    """Train on the committed batches of the run in `directory`; its State at the end.

    Args:
        directory: of the run.
        store: that holds the model that the run inherited from, if it did.
        device: to replay on.
        whole: each committed batch is read whole, by one thread; see the module.
        until: the last step that is replayed; all of them by default.

    Raises:
        NotFound: there is no journal.
        TrainError: the train function does not draw the batches that the journal has.
        ConfigError: workers took steps by themselves.
    """
    events = list(journal.read(directory / "journal.jsonl"))
    # The last one: a run that was continued may have been given more epochs.
    opening = next(event for event in reversed(events) if isinstance(event, RunStarted))
    steps = [step for step in standing(events) if until is None or step.step <= until]
    if opening.exchange.get("every_steps") is not None:
        raise ConfigError(
            f"the run in {directory} has ExchangeConfig(every_steps=...): each worker took steps "
            "by itself, with an optimizer's state that no journal has. Nothing was replayed; only "
            "runs that exchange gradients can be."
        )
    train = pickle.loads((directory / "train.pkl").read_bytes())
    replayed_steps = steps_of(steps, events)
    replaying = _Replay(
        [whole_step(replayed) for replayed in replayed_steps] if whole else replayed_steps,
        left_out(events),
        loaders_of(events),
        opening,
        torch.device(device),
        whole=whole,
    )
    inherited = next((e for e in events if isinstance(e, TensorsInherited)), None)
    if inherited is not None:
        replaying.inherits(inherited.found, store or store_of(directory))
    return replaying.run(train, opening.config)


def compare(
    directory: Path, store: Path | None = None, device: str = "cpu", *, whole: bool = False
) -> Difference:
    """Replay a run up to the State that it stored last, and compare its modules' tensors with that.

    Of an exact run all that a State holds is compared, byte by byte; see exact_replay.

    Args:
        directory: of the run.
        store: that holds its States; by default the one of which `directory` is a run.
        device: to replay on.
        whole: see `replay`.
    """
    events = list(journal.read(directory / "journal.jsonl"))
    last = last_stored(events)
    if last is None:
        raise TrainError(f"the run in {directory} stored no State to compare with.")
    with Store(store or store_of(directory), read_only=True) as opened:
        state = opened.get(last.ref).clone()
    if "exact" in state.meta and not whole:
        apart = _compare_bytes(directory, events, last, state, store)
        worst, relative = (apart[0], math.inf) if apart else ("", 0.0)
        return Difference(last.step, worst, relative, apart)
    ours = replay(directory, store, device, whole=whole, until=last.step).tensors
    theirs = {name: state.tensors[name] for name in ours}
    worst, relative = "", 0.0
    for name, tensor in theirs.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            gap = float(not torch.equal(tensor, ours[name]))
        else:
            gap = difference(tensor, ours[name].cpu())
        if not worst or gap > relative:
            worst, relative = name, gap
    return Difference(last.step, worst, relative)


def difference(stored: torch.Tensor, replayed: torch.Tensor) -> float:
    """The largest, relative to the largest finite value; infinite where one alone is finite."""
    if not stored.is_complex():  # of eight bits, nothing can be subtracted
        stored, replayed = stored.double(), replayed.double()
    same = (stored == replayed) | (stored.isnan() & replayed.isnan())
    gaps = (stored - replayed).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)
    scale = stored.abs().masked_fill(~stored.isfinite(), 0)
    return float(gaps.max()) / (float(scale.max()) or 1.0) if stored.numel() else 0.0


def _compare_bytes(
    directory: Path, events: Sequence[Event], last: StateStored, state: State, store: Path | None
) -> tuple[str, ...]:
    inherited = next((e.found for e in events if isinstance(e, TensorsInherited)), None)
    ancestor = State({})
    if inherited is not None:
        with Store(store or store_of(directory), read_only=True) as opened:
            ancestor = opened.get(inherited["ref"]).clone()
    recorded = Recorded(
        opening=next(event for event in reversed(events) if isinstance(event, RunStarted)),
        steps=[step for step in standing(events) if step.step <= last.step],
        ended=last.reason == "final",
        inherited=inherited,
        ancestor=ancestor,
        opened=loaders_of(events),
    )
    train = pickle.loads((directory / "train.pkl").read_bytes())
    return tuple(differing(train, recorded, state))


def store_of(directory: Path) -> Path:
    """The store of the run in `directory`: STORE/runs/NAME, or a local run's own."""
    own = directory / "store"
    return own if own.is_dir() else directory.resolve().parents[1]


_current = threading.local()


def _within() -> bool:
    """Whether this thread is in what counts as one backward pass."""
    return getattr(_current, "within", False)


@contextmanager
def _outermost_backward_ends_the_step() -> Iterator[None]:
    """Checkpoints that re-enter autograd call backward within backward, in the same thread."""
    plain = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        replica: _Replica | None = getattr(_current, "replica", None)
        if replica is None or _within():
            plain(*args, **kwargs)
            return
        with replica.outermost_pass():
            plain(*args, **kwargs)
        replica.backward_over()

    vars(torch.autograd)["backward"] = backward
    try:
        yield
    finally:
        vars(torch.autograd)["backward"] = plain


class _Replay:
    """Threads that run the same train function, each with a replica and a share of every batch."""

    def __init__(
        self,
        replayed_steps: Sequence[ReplayedStep],
        left_out: Mapping[int, Sequence[tuple[int, tuple[Span, ...]]]],
        opened: Mapping[int, LoaderOpened],
        opening: RunStarted,
        device: torch.device,
        *,
        whole: bool,
    ) -> None:
        self.replayed_steps = replayed_steps
        self.left_out = left_out
        self.opened = opened
        width = max([1, *(len(replayed.workers) for replayed in replayed_steps)])
        self.seed, self.seed_of_order = opening.seed, opening.seed_of_order
        self.device = device
        self.barrier = threading.Barrier(width, timeout=_TIMEOUT_S)
        self.first_prepared = threading.Event()
        self.whole = whole
        self.replicas = [_Replica(self, number) for number in range(width)]
        self.failure: BaseException | None = None
        self.inherited: Mapping[str, Any] | None = None
        self.ancestor = State({})

    def inherits(self, found: Mapping[str, Any], store: Path) -> None:
        """What `ctx.inherit` copied in the run, it copies here."""
        self.inherited = found
        with Store(store, read_only=True) as opened:
            self.ancestor = opened.get(found["ref"])

    def run(self, train: Callable[[Context], None], config: Mapping[str, Any]) -> State:
        threads = [
            threading.Thread(target=self._run_one, args=(replica, train, config), daemon=True)
            for replica in self.replicas
        ]
        # The first builds its model alone: the random numbers are the process's.
        torch.manual_seed(self.seed)
        with _outermost_backward_ends_the_step():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise TrainError(f"the replay failed: {self.failure!r}") from self.failure
        return self.replicas[0].capture()

    def _run_one(
        self, replica: "_Replica", train: Callable[[Context], None], config: Mapping[str, Any]
    ) -> None:
        _current.replica = replica
        try:
            if replica.me > 0:
                self.first_prepared.wait(_TIMEOUT_S)
            train(Context(replica, config))
        except _Over:
            return
        except BaseException as error:  # noqa: BLE001 - a thread's border; run raises it
            if not isinstance(error, threading.BrokenBarrierError):
                self.failure = self.failure or error
            self.first_prepared.set()
            self.barrier.abort()


class _Replica:
    """One replica, in a thread of its own. See context.Replica."""

    mesh, place = None, 0

    def __init__(self, replay: _Replay, number: int) -> None:
        self.me = number
        self.step = 0
        self.generation = 1
        self.device = replay.device
        self.settings, self.run = self, "replay"
        self.alone = False
        self.exact = self.steps_alone = False
        self.seed_of_order = replay.seed_of_order
        self.scale = 0.0  # of the last backward pass
        self.counted = False  # anybody's samples in this step
        self.has_samples = False  # this one, in this step
        self.loss = 0.0
        self.values: dict[str, float] = {}
        self._rate: RateScaling | None = None
        self.modules: dict[str, torch.nn.Module] = {}
        self._replay = replay
        self._loaders: list[_ReplayLoader] = []
        self._memories: list[Rehearsal] = []
        self._inherits: torch.nn.Module | None = None
        self._deferred = False
        self._active = False
        self._begun = False  # this step has had a backward pass
        self._passed = True  # there was one since the last batch was drawn
        self._shares: dict[int, int] | None = None  # of what a pass is about, by worker
        self._worker: int | None = None  # whose share of them this thread has
        self.drawn: list[BatchShares] = []
        self._buffers_then: list[torch.Tensor] = []
        self.buffers_before: list[torch.Tensor] = []
        self.buffers_moved: list[torch.Tensor] = []
        self.whole = replay.whole
        self._slicing = False  # within the loop over the slices of a batch
        self._part = 0.0  # of the batch that the slice in hand is

    @property
    def prepared(self) -> bool:
        return bool(self.modules)

    @property
    def rank(self) -> int:
        return self.me

    @property
    def world_size(self) -> int:
        return len(self._replay.replicas)

    def inherit(
        self, model: torch.nn.Module, rehearsal: Rehearsal | None
    ) -> Mapping[str, Any] | None:
        found = self._replay.inherited
        own = model.state_dict()
        for name, theirs in (found["tensors"] if found else {}).items():
            own[name].copy_(self._replay.ancestor.tensors[theirs])
        self._inherits = model if found else None
        if found and rehearsal is not None:
            rehearsal.inherit(self._replay.ancestor)
        return found

    def prepare(self, objects: Sequence[Any]) -> None:
        modules = [o for o in objects if isinstance(o, torch.nn.Module)]
        prefixes = state_entries.prefixes(len(modules))
        self.modules = dict(zip(prefixes, (m.to(self.device) for m in modules), strict=True))
        if self._replay.inherited and self._inherits is modules[0]:
            optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
            others = {f"optimizer{n or ''}": other for n, other in enumerate(optimizers)}
            warm_start(
                self.modules, others, self._replay.ancestor, self._replay.inherited["tensors"]
            )
        for parameter in self.parameters():
            parameter.grad = None
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)
        for other in objects:
            if isinstance(other, torch.optim.Optimizer):
                share_loss(other, self._mean_loss)
        self._replay.first_prepared.set()
        self._together()
        if self.me > 0:
            for mine, first in zip(modules, self._replay.replicas[0].modules.values(), strict=True):
                mine.load_state_dict(first.state_dict())
        self._together()
        self._begin()

    def track(self, objects: Mapping[str, Stateful]) -> None:
        """They are built afresh here, as on every founder."""

    def scale_rate(self, scaling: RateScaling) -> None:
        self._rate = scaling

    def parameters(self) -> list[torch.nn.Parameter]:
        every = (p for module in self.modules.values() for p in module.parameters())
        return list({id(p): p for p in every}.values())

    def buffers(self) -> list[torch.Tensor]:
        return [b for module in self.modules.values() for b in module.buffers()]

    def open_loader(self, source: Source) -> "_ReplayLoader":
        if source.memory is not None:
            if not any(source.memory.rehearsal is known for known in self._memories):
                source.memory.rehearsal.check_fresh(source.memory.number)
                self._memories.append(source.memory.rehearsal)
            source.memory.rehearsal.open(source.memory.number)
        number = len(self._loaders)
        check_order(number, source, self._replay.opened)
        batches = [
            (batch, replayed)
            for replayed in self._replay.replayed_steps
            for batch in replayed.committed.batches
            if batch.loader == number
        ]
        left_out = self._replay.left_out.get(number, [])
        loader = _ReplayLoader(self, number, source, batches, left_out)
        self._loaders.append(loader)
        return loader

    @property
    def members(self) -> int:
        replayed = self._replay.replayed_steps[min(self.step, len(self._replay.replayed_steps) - 1)]
        return replayed.committed.world_size

    def boundary(self) -> None:
        if self.step >= len(self._replay.replayed_steps):
            raise _Over

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            self._passed = True  # whether or not this worker had anything to learn from

    @contextmanager
    def backward(self) -> Iterator[None]:
        if _within():  # a part of the one around it
            yield
            return
        with self.outermost_pass():  # whoever puts gradients there, autograd or other code
            yield
        if not (self._deferred or self._slicing):
            self._active = True
            self.backward_over()

    def evaluate(
        self,
        metric: Metric,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate,
        microbatch: int | None = None,
    ) -> dict[str, float]:
        """Only so that the train function can go on; not what is compared."""
        del batch_size, microbatch
        everything = collate([dataset[i] for i in range(len(dataset))])  # type: ignore[arg-type]
        with evaluating(self.modules[""]):
            return measure(metric, self.modules[""], to_device(everything, self.device))

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """By the shares of the last batch, as the run had it but for who was lost meanwhile."""
        self.values = dict(values)
        self._together()
        weights = [(replica.values, replica.scale) for replica in self._replay.replicas]
        whole = sum(scale for _, scale in weights)
        means = {name: sum(v[name] * w for v, w in weights if w) / (whole or 1) for name in values}
        self._together()
        return means

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Nobody reads it."""

    def on_phase(self, listener: Callable[[str, int], None]) -> None:
        """There are none: kills that were in store for the run do not happen here."""

    def capture(self) -> State:
        return capture(self.modules, {}).clone()

    def draw(
        self,
        batch: BatchShares,
        replayed: ReplayedStep,
        weigh: Callable[[Sequence[Span]], int],
    ) -> tuple[Span, ...]:
        """A batch is drawn; this thread's share of it."""
        self.drawn.append(batch)
        mine = replayed.workers[self.me] if self.me < len(replayed.workers) else None
        if self._passed:
            if self._begun:
                self._move_buffers()
            self._passed, self._shares, self._worker = False, weights(batch, weigh), mine
        elif not batch.whole:  # then it has the ratio of the others, too
            self._shares = weights(batch, weigh)
        if mine in batch.whole:
            return next(iter(batch.shares.values()))
        return batch.shares.get(mine, ()) if mine is not None else ()

    def _ready(self, _parameter: torch.Tensor) -> None:
        self._active = self._active or not self._deferred

    @contextmanager
    def outermost_pass(self) -> Iterator[None]:
        """What is one backward pass, whatever further ones run within it."""
        _current.within = True
        try:
            with self._one_pass():
                yield
        finally:
            _current.within = False

    @contextmanager
    def _one_pass(self) -> Iterator[None]:
        """A backward pass, after which its gradients are added as they count."""
        self.boundary()
        self._weigh()
        before = [parameter.grad for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, earlier in zip(self.parameters(), before, strict=True):
                part, parameter.grad = parameter.grad, earlier
                self._add(parameter, part)
            self._begun = self._passed = True

    def _add(self, parameter: torch.nn.Parameter, part: torch.Tensor | None) -> None:
        if parameter.grad is not None and not self._begun:  # all have what the last step left
            parameter.grad = parameter.grad / len(self._replay.replicas)
        if part is not None and self.scale:
            scaled = part * self.scale
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled

    def _weigh(self) -> None:
        """A pass is about the batches drawn last."""
        if self._shares is None:  # nothing was ever drawn
            self.scale, self.counted = float(self.me == 0), True
            return
        if self._slicing:
            self.scale, self.counted = self._part, True
            return
        present = self._replay.replayed_steps[self.step].present
        left = {w: n for w, n in self._shares.items() if present is None or w in present}
        total = sum(left.values())
        mine = left.get(self._worker, 0) if self._worker is not None else 0
        self.scale = mine / total if total else 0.0
        self.counted = self.counted or total > 0

    def _begin(self) -> None:
        """The next step."""
        self._begun = self._active = self.counted = self.has_samples = False
        self._passed = True
        self.drawn = []
        self.buffers_before = self._buffers_then = [buffer.clone() for buffer in self.buffers()]
        self.buffers_moved = [torch.zeros_like(buffer) for buffer in self.buffers()]

    def _move_buffers(self) -> None:
        """They change as far as the passes count; what was not finite is averaged by its value."""
        self.has_samples = self.has_samples or self.scale > 0
        for buffer, then, moved, base in zip(
            self.buffers(),
            self._buffers_then,
            self.buffers_moved,
            self.buffers_before,
            strict=True,
        ):
            averaged = buffer.is_floating_point() or buffer.is_complex()
            if averaged and not self._slicing:
                moved.masked_fill_(~base.isfinite(), 0)  # that of the last passes counts
            if not self.scale:
                buffer.data.copy_(then)
            elif averaged:
                change = torch.where(buffer == then, 0, buffer - then)
                moved += torch.where(base.isfinite(), change, buffer) * self.scale
        self._buffers_then = [buffer.clone() for buffer in self.buffers()]

    def backward_over(self) -> None:
        """The outermost backward pass has ended; if it brought gradients, this is the step."""
        if self._active and not self._slicing:
            self._move_buffers()
            self._step_over()

    def _step_over(self) -> None:
        replayed = self._replay.replayed_steps[self.step]
        batches = len(replayed.committed.batches)
        if len(self.drawn) != batches:
            raise TrainError(
                f"step {self.step + 1} of the journal has {batches} batches; "
                f"the train function drew {len(self.drawn)}. Nothing can be compared. Was the "
                "train function changed since?"
            )
        self._together()
        if self.me == 0:
            _average(self._replay.replicas)
        self._together()
        if self._rate is not None:
            self._rate.observe(replayed.committed.world_size)
        self.step += 1
        self._begin()

    def slices(self, batches: Sequence[tuple[float, Any]]) -> Iterator[Any]:
        """A step in slices: what each of them is of the batch, and what is read for it."""
        self._slicing = True
        highest: list[torch.Tensor] = []
        for self._part, batch in batches:
            yield batch
            self._move_buffers()
            highest = [
                most if most.is_floating_point() or most.is_complex() else higher(most, now)
                for most, now in zip(highest or self._buffers_then, self.buffers(), strict=True)
            ]
            self._put(self.buffers_before)
            self._buffers_then = self.buffers_before
        self._put(highest or self.buffers_before)
        self._slicing = False
        self._step_over()

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for buffer, value in zip(self.buffers(), values, strict=True):
            buffer.data.copy_(value)  # as batch norm does it, unseen by graphs of before

    def _mean_loss(self, loss: float) -> float:
        self.loss = loss
        self._together()
        total = sum(
            replica.scale * replica.loss for replica in self._replay.replicas if replica.scale
        )
        self._together()
        return total

    def _together(self) -> None:
        self._replay.barrier.wait()


def _average(replicas: Sequence[_Replica]) -> None:
    """Gradients become the sum of what the threads have; buffers change by the sum, or maximum."""
    counted = any(replica.counted for replica in replicas)
    for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
        parts = [parameter.grad for parameter in copies if parameter.grad is not None]
        for parameter in copies:
            parameter.grad = torch.stack(parts).sum(0) if parts and counted else None
    had_samples = [replica for replica in replicas if replica.has_samples] or replicas
    with torch.no_grad():
        for place, base in enumerate(replicas[0].buffers_before):
            buffers = [replica.buffers()[place] for replica in replicas]
            if base.is_floating_point() or base.is_complex():
                change = torch.stack([replica.buffers_moved[place] for replica in replicas]).sum(0)
                moved = torch.where(change == 0, base, base + change)
                value = torch.where(base.isfinite(), moved, change)
            else:
                value = reduce(higher, [replica.buffers()[place] for replica in had_samples])
            for buffer in buffers:
                buffer.data.copy_(value)  # as batch norm does it, unseen by graphs of before


class _ReplayLoader:
    """Gives a replica its share of each committed batch.

    Args:
        replica: that asks for it.
        number: of the loader, in the order in which they were made.
        source: what is read, and how.
        batches: in the order in which they were drawn.
        left_out: what is never used, from after which step on.
    """

    def __init__(
        self,
        replica: _Replica,
        number: int,
        source: Source,
        batches: Sequence[tuple[BatchShares, ReplayedStep]],
        left_out: Sequence[tuple[int, tuple[Span, ...]]],
    ) -> None:
        self.dataset: Dataset[Any] = source.dataset
        self.epoch = 0
        self._replica = replica
        self._number = number
        self._source = source
        self._batches = deque(batches)
        self._left_out = left_out
        self._used: tuple[Span, ...] = ()  # but for what the step in hand has lost
        self._drawn_out = False

    def epochs(self, total: int) -> Iterator["_ReplayLoader"]:
        while self.epoch < total:
            self._drawn_out = False
            yield self
            more = self._batches and self._batches[0][0].epoch == self.epoch
            if self.epoch + 1 < total or not (self._drawn_out and more):
                self.epoch += 1

    @property
    def number(self) -> int:
        return self.epoch

    def __len__(self) -> int:
        """As the run's loader had it: what comes back of the step in hand is not known yet."""
        in_hand = (batch for batch in self._replica.drawn if batch.loader == self._number)
        owed = (span for batch in in_hand for span in batch.owed)
        left_out = (
            span for step, spans in self._left_out for span in spans if step <= self._replica.step
        )
        whole = ((0, (self.epoch + 1) * self._source.length),)
        left = subtract(whole, merge((*self._used, *owed, *left_out)))
        size = self._source.batch_size
        if self._source.per_worker:
            size *= self._replica.members
        return -(-count(left) // size)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - whatever collate makes
        if not self._batches:
            self._replica.boundary()
        if not self._batches or self._batches[0][0].epoch != self.epoch or self._comes_back_later():
            self._drawn_out = True
            raise StopIteration
        batch, replayed = self._batches.popleft()
        used = (span for spans in batch.shares.values() for span in spans)
        self._used = merge((*self._used, *used))
        share = self._replica.draw(batch, replayed, self._source.weigh)
        if self._source.slices is None:
            return self._source.read(share)
        return self._replica.slices(self._sliced(share))

    def _sliced(self, batch: tuple[Span, ...]) -> list[tuple[float, Any]]:
        """The slices of a batch as the run had them; for a thread without it, a placeholder."""
        number = 1 if self._replica.whole else self._source.slices or 1
        usual = max(count(batch), self._source.batch_size)
        slices = split(batch, number, usual, self._source.unit)
        weigh = self._source.weigh
        parts = [(weigh(spans) / weigh(batch), spans) for spans in slices if spans] or [(0.0, ())]
        return [(part, self._source.read(spans)) for part, spans in parts]

    def _comes_back_later(self) -> bool:
        """The run's loader had come to an end: its next batch is owed by the step in hand."""
        upcoming, _ = self._batches[0]
        spans = (*(span for share in upcoming.shares.values() for span in share), *upcoming.owed)
        drawn = (batch for batch in self._replica.drawn if batch.loader == self._number)
        return not subtract(spans, merge(span for batch in drawn for span in batch.owed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 if the weights are equal within the tolerance, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m elastix.testing.replay",
        description="Train one process on the committed batches of a run and compare the weights.",
    )
    parser.add_argument("run", type=Path, help="directory of the run: STORE/runs/NAME")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative, per tensor")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    try:
        found = compare(options.run, device=options.device)
    except ElastixError as error:
        print(f"replay: {error}", file=sys.stderr)  # noqa: T201
        return 2
    equal = found.relative <= options.tolerance
    tolerance = "" if found.apart is not None else f" (tolerance {options.tolerance:g})"
    verdict = "equal" if equal else "DIFFERENT"
    print(f"{verdict} after {found.steps} steps: {found}{tolerance}")  # noqa: T201
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

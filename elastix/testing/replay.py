"""Law 2: one process, fed the committed batches of a journal, ends with the same weights.

    python -m elastix.testing.replay runs/store/runs/NAME

The run's own train function is run again, once per share of a batch, in threads that move in step:
thread t is given the t-th share of each committed batch, and gradients and buffers are averaged
by sample count with plain arithmetic. A step that drew nothing is about the batch before it, as far
as those who had its shares were still there. Nothing of elastix.comm takes part, and no loader: who
was in the group, what failed, and what was owed shows only in the journal. So this checks reducer,
recovery and cursor at once, on any job.

A train function with dropout or other random numbers gives other weights; that is its nature.
"""

import argparse
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from elastix.data.cursor import count
from elastix.data.source import Collate, Source, to_device
from elastix.errors import ElastixError, TrainError
from elastix.events import (
    BatchShares,
    Event,
    GenerationFormed,
    Resumed,
    RunStarted,
    StateStored,
    StepCommitted,
    TensorsInherited,
)
from elastix.observe import journal
from elastix.state import State, Stateful, capture, warm_start
from elastix.store import Store
from elastix.train.context import Context
from elastix.train.evaluation import Metric, evaluating, measure
from elastix.train.loss import share_loss
from elastix.train.member import Member
from elastix.train.rate import RateScaling

_TIMEOUT_S = 600.0


class _Over(BaseException):
    """Every committed step is replayed."""


@dataclass(frozen=True)
class Difference:
    """How far the replay is from the run.

    Attributes:
        steps: steps replayed.
        worst: name of the tensor that differs most.
        relative: its largest difference over its largest value.
    """

    steps: int
    worst: str
    relative: float


def replay(directory: Path, store: Path | None = None, device: str = "cpu") -> State:
    """Train on the committed batches of the run in `directory`; its State at the end.

    Args:
        directory: of the run.
        store: that holds the model that the run inherited from, if it did.
        device: to replay on.

    Raises:
        NotFound: there is no journal.
        TrainError: the train function does not draw the batches that the journal has.
    """
    events = list(journal.read(directory / "journal.jsonl"))
    # The last one: a run that was continued may have been given more epochs.
    opening = next(event for event in reversed(events) if isinstance(event, RunStarted))
    steps = _standing(events)
    train = pickle.loads((directory / "train.pkl").read_bytes())
    choir = _Choir(_turns(steps, events), opening.seed, torch.device(device))
    inherited = next((e for e in events if isinstance(e, TensorsInherited)), None)
    if inherited is not None:
        choir.inherits(inherited.found, store or store_of(directory))
    return choir.sing(train, opening.config)


def compare(directory: Path, store: Path | None = None, device: str = "cpu") -> Difference:
    """Replay a run and compare its modules' tensors with the State that it stored last.

    Args:
        directory: of the run.
        store: that holds its States; by default the one of which `directory` is a run.
        device: to replay on.
    """
    stored = [e for e in journal.read(directory / "journal.jsonl") if isinstance(e, StateStored)]
    if not stored:
        raise TrainError(f"the run in {directory} stored no State to compare with.")
    ours = replay(directory, store, device).tensors
    with Store(store or store_of(directory), read_only=True) as opened:
        state = opened.get(stored[-1].ref)
    theirs = {name: state.tensors[name] for name in ours}
    worst, relative = "", 0.0
    for name, tensor in theirs.items():
        if not tensor.is_floating_point():
            difference = float(not torch.equal(tensor, ours[name]))
        else:
            scale = float(tensor.abs().max()) if tensor.numel() else 1.0
            gap = float((tensor - ours[name].cpu()).abs().max()) if tensor.numel() else 0.0
            difference = gap / (scale or 1.0)
        if not worst or difference > relative:
            worst, relative = name, difference
    return Difference(stored[-1].step, worst, relative)


def store_of(directory: Path) -> Path:
    """The store of the run in `directory`: STORE/runs/NAME, or a local run's own."""
    own = directory / "store"
    return own if own.is_dir() else directory.resolve().parents[1]


def _standing(events: Sequence[Event]) -> list[StepCommitted]:
    """Committed steps but for those that a restart went back behind."""
    steps: list[StepCommitted] = []
    for event in events:
        if isinstance(event, Resumed):
            steps = [step for step in steps if step.step <= event.step]
        elif isinstance(event, StepCommitted):
            steps.append(event)
    return steps


@dataclass(frozen=True)
class _Turn:
    """One step: whose shares the voices sing, and how many samples of each count.

    Attributes:
        workers: by voice; of the last step that drew, if this one did not.
        samples: by voice.
    """

    committed: StepCommitted
    workers: tuple[int, ...]
    samples: tuple[int, ...]


def _turns(steps: Sequence[StepCommitted], events: Sequence[Event]) -> list[_Turn]:
    members: dict[int, tuple[int, ...]] = {}
    standing = {id(step) for step in steps}
    window: dict[int, int] = {}
    turns = []
    for event in events:
        if isinstance(event, GenerationFormed):
            members[event.generation] = event.members
        if not isinstance(event, StepCommitted) or id(event) not in standing:
            continue
        if event.batches:
            window = {}
            for batch in event.batches:
                for worker, spans in batch.shares.items():
                    window[int(worker)] = window.get(int(worker), 0) + count(spans)
        present = members.get(event.generation, tuple(window))
        samples = tuple(n if worker in present else 0 for worker, n in window.items())
        turns.append(_Turn(event, tuple(window), samples if window else (1,)))
    return turns


_singing = threading.local()


@contextmanager
def _outermost_backward_ends_the_step() -> Iterator[None]:
    """Checkpoints that re-enter autograd call backward within backward, in the same thread."""
    plain = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        _singing.depth = getattr(_singing, "depth", 0) + 1
        try:
            plain(*args, **kwargs)
        finally:
            _singing.depth -= 1
        voice: _Voice | None = getattr(_singing, "voice", None)
        if voice is not None and not _singing.depth:
            voice.backward_over()

    vars(torch.autograd)["backward"] = backward
    try:
        yield
    finally:
        vars(torch.autograd)["backward"] = plain


class _Choir:
    """Threads that run the same train function, each with a replica and a share of every batch."""

    def __init__(self, turns: Sequence[_Turn], seed: int, device: torch.device) -> None:
        self.turns = turns
        width = max((len(turn.samples) for turn in turns), default=1)
        self.seed = seed
        self.device = device
        self.barrier = threading.Barrier(width, timeout=_TIMEOUT_S)
        self.first_prepared = threading.Event()
        self.voices = [_Voice(self, number) for number in range(width)]
        self.failure: BaseException | None = None
        self.inherited: Mapping[str, Any] | None = None
        self.ancestor = State({})

    def inherits(self, found: Mapping[str, Any], store: Path) -> None:
        """What `ctx.inherit` copied in the run, it copies here."""
        self.inherited = found
        with Store(store, read_only=True) as opened:
            self.ancestor = opened.get(found["ref"])

    def sing(self, train: Callable[[Context], None], config: Mapping[str, Any]) -> State:
        threads = [
            threading.Thread(target=self._run, args=(voice, train, config), daemon=True)
            for voice in self.voices
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
        return self.voices[0].capture()

    def _run(
        self, voice: "_Voice", train: Callable[[Context], None], config: Mapping[str, Any]
    ) -> None:
        _singing.voice = voice
        try:
            if voice.me > 0:
                self.first_prepared.wait(_TIMEOUT_S)
            train(Context(cast("Member", voice), config))
        except _Over:
            return
        except BaseException as error:  # noqa: BLE001 - a thread's border; sing raises it
            if not isinstance(error, threading.BrokenBarrierError):
                self.failure = self.failure or error
            self.first_prepared.set()
            self.barrier.abort()


class _Voice:
    """One replica. Has the methods of Member that Context calls."""

    def __init__(self, choir: _Choir, number: int) -> None:
        self.me = number
        self.step = 0
        self.generation = 1
        self.device = choir.device
        self.settings = self
        self.alone = False
        self.seed = choir.seed
        self.samples = 0
        self.drawn = 0
        self.loss = 0.0
        self._rate: RateScaling | None = None
        self.modules: dict[str, torch.nn.Module] = {}
        self._choir = choir
        self._loaders: list[_ReplayLoader] = []
        self._inherits: torch.nn.Module | None = None
        self._deferred = False
        self._active = False

    @property
    def prepared(self) -> bool:
        return bool(self.modules)

    @property
    def rank(self) -> int:
        return self.me

    @property
    def world_size(self) -> int:
        return len(self._choir.voices)

    def inherit(self, model: torch.nn.Module) -> Mapping[str, Any] | None:
        found = self._choir.inherited
        own = model.state_dict()
        for name, theirs in (found["tensors"] if found else {}).items():
            own[name].copy_(self._choir.ancestor.tensors[theirs])
        self._inherits = model if found else None
        return found

    def prepare(self, objects: Sequence[Any]) -> None:
        modules = [o for o in objects if isinstance(o, torch.nn.Module)]
        prefixes = ["", *(f"@module{i}/" for i in range(1, len(modules)))]
        self.modules = dict(zip(prefixes, (m.to(self.device) for m in modules), strict=True))
        if self._choir.inherited and self._inherits is modules[0]:
            optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
            others = {f"optimizer{n or ''}": other for n, other in enumerate(optimizers)}
            warm_start(self.modules, others, self._choir.ancestor, self._choir.inherited["tensors"])
        for parameter in self.parameters():
            if parameter.requires_grad:
                hook = self._ready
                parameter.register_post_accumulate_grad_hook(hook)
        for other in objects:
            if isinstance(other, torch.optim.Optimizer):
                share_loss(other, self._mean_loss)
        self._choir.first_prepared.set()
        self._together()
        if self.me > 0:
            for mine, first in zip(modules, self._choir.voices[0].modules.values(), strict=True):
                mine.load_state_dict(first.state_dict())
        self._together()

    def track(self, objects: Mapping[str, Stateful]) -> None:
        """They are built afresh here, as on every founder."""

    def scale_rate(self, scaling: RateScaling) -> None:
        self._rate = scaling

    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for module in self.modules.values() for p in module.parameters()]

    def buffers(self) -> list[torch.Tensor]:
        return [b for module in self.modules.values() for b in module.buffers()]

    def open_loader(self, source: Source) -> "_ReplayLoader":
        number = len(self._loaders)
        batches = [
            (batch, turn.workers)
            for turn in self._choir.turns
            for batch in turn.committed.batches
            if batch.loader == number
        ]
        loader = _ReplayLoader(self, source, batches)
        self._loaders.append(loader)
        return loader

    def boundary(self) -> None:
        if self.step >= len(self._choir.turns):
            raise _Over

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def evaluate(
        self,
        metric: Metric,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate,
    ) -> dict[str, float]:
        """Only so that the train function can go on; not what is compared."""
        del batch_size
        everything = collate([dataset[i] for i in range(len(dataset))])  # type: ignore[arg-type]
        with evaluating(self.modules[""]):
            return measure(metric, self.modules[""], to_device(everything, self.device))

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Nobody reads it."""

    def on_phase(self, listener: Callable[[str, int], None]) -> None:
        """There are none: kills that were in store for the run do not happen here."""

    def capture(self) -> State:
        return capture(self.modules, {}).clone()

    def _ready(self, _parameter: torch.Tensor) -> None:
        self._active = self._active or not self._deferred

    def backward_over(self) -> None:
        """The outermost backward pass has ended; if it brought gradients, this is the step."""
        if not self._active:
            return
        self._active = False
        self.boundary()
        turn = self._choir.turns[self.step]
        self.samples = turn.samples[self.me] if self.me < len(turn.samples) else 0
        if turn.committed.batches and self.drawn != self.samples:
            raise TrainError(
                f"step {self.step + 1} of the journal has {self.samples} samples for one of its "
                f"workers; the train function drew {self.drawn}. Nothing can be compared. Was the "
                "train function changed since?"
            )
        self.drawn = 0
        self._together()
        if self.me == 0:
            _average(self._choir.voices)
        self._together()
        if self._rate is not None:
            self._rate.observe(turn.committed.world_size)
        self.step += 1

    def _mean_loss(self, loss: float) -> float:
        self.loss = loss
        self._together()
        counted = [(voice.samples, voice.loss) for voice in self._choir.voices if voice.samples]
        self._together()
        total = sum(samples for samples, _ in counted)
        return sum(samples * loss for samples, loss in counted) / total

    def _together(self) -> None:
        self._choir.barrier.wait()


def _average(voices: Sequence[_Voice]) -> None:
    """Gradients and floating buffers become their mean by samples, other buffers the maximum."""
    total = sum(voice.samples for voice in voices)
    for replicas in zip(*(voice.parameters() for voice in voices), strict=True):
        mean = None
        for voice, parameter in zip(voices, replicas, strict=True):
            if parameter.grad is not None and voice.samples:
                part = parameter.grad * (voice.samples / total)
                mean = part if mean is None else mean + part
        for parameter in replicas:
            parameter.grad = None if mean is None else mean.clone()
    with torch.no_grad():
        for replicas in zip(*(voice.buffers() for voice in voices), strict=True):
            counted = [
                (voice.samples / total, buffer)
                for voice, buffer in zip(voices, replicas, strict=True)
                if voice.samples
            ]
            if not counted:
                continue
            if all(torch.equal(buffer, counted[0][1]) for _, buffer in counted):
                value = counted[0][1].clone()
            elif counted[0][1].is_floating_point():
                value = torch.stack([weight * buffer for weight, buffer in counted]).sum(0)
            else:
                value = torch.stack([buffer for _, buffer in counted]).amax(0)
            for buffer in replicas:
                buffer.data.copy_(value)  # as batch norm does it, unseen by graphs of before


class _ReplayLoader:
    """Gives a voice its share of each committed batch."""

    def __init__(
        self,
        voice: _Voice,
        source: Source,
        batches: Sequence[tuple[BatchShares, tuple[int, ...]]],
    ) -> None:
        self.epoch = 0
        self._voice = voice
        self._source = source
        self._batches = deque(batches)

    def epochs(self, total: int) -> Iterator["_ReplayLoader"]:
        while self.epoch < total:
            yield self
            self.epoch += 1

    @property
    def number(self) -> int:
        return self.epoch

    def __len__(self) -> int:
        return sum(batch.epoch == self.epoch for batch, _ in self._batches)

    def __iter__(self) -> Iterator[Any]:
        while self._batches and self._batches[0][0].epoch == self.epoch:
            batch, workers = self._batches.popleft()
            voice = self._voice
            mine = batch.shares.get(workers[voice.me], ()) if voice.me < len(workers) else ()
            voice.drawn += count(mine)
            yield self._source.read(mine)
        if not self._batches:
            self._voice.boundary()


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
    print(  # noqa: T201
        f"{'equal' if equal else 'DIFFERENT'} after {found.steps} steps: largest relative "
        f"difference {found.relative:.2e}, in {found.worst} (tolerance {options.tolerance:g})"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

"""One worker's side of a run: ties the group, the data and the State together. No Ray.

It is the Participant of Rounds, the Steps of the Reducer and the Pace of the Loaders. What it
needs from the process around it is a Link.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import Dataset

from elastix import state as states
from elastix.comm.group import Group, Pending, Reduce, Wiring
from elastix.comm.news import News
from elastix.comm.reducer import Reducer, Weight
from elastix.comm.rounds import Left, Recovery, Rounds
from elastix.config import CheckpointConfig
from elastix.data.loader import Collate, Loader, Source
from elastix.errors import ConfigError
from elastix.events import (
    EpochsPlanned,
    Event,
    Recovered,
    Reported,
    StepCommitted,
    WorkerJoined,
)
from elastix.state import RandomState, State, Stateful
from elastix.train.checkpoint import Checkpoints
from elastix.train.evaluation import Evaluation, Metric


class Link(Protocol):
    """What the process around a member does for it. No call blocks for long."""

    def ready(self) -> None:
        """Tell the controller that this worker waits to be let in."""
        ...

    def entered(self, generation: int) -> None:
        """Tell the controller that this worker has the State."""
        ...

    def doubt(self, generation: int, error: BaseException) -> None:
        """Tell the controller that an operation failed."""
        ...

    def leave(self) -> None:
        """Tell the controller that this worker was given notice, and is to go."""
        ...

    def emit(self, event: Event, serial: int | None = None) -> None:
        """Send an event to the journal. One with a serial may come from several workers."""
        ...

    def journaled(self) -> int:
        """The highest serial that the journal has confirmed; -1 for none."""
        ...

    def phase(self, name: str, detail: int) -> None:
        """Where the training thread is."""
        ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every worker of a run is told when it starts.

    Attributes:
        resume: file of the State to start from; None to start afresh.
    """

    directory: Path
    seed: int
    min_workers: int
    checkpoint: CheckpointConfig
    resume: Path | None = None


class Member:
    """See the module. All methods are called in the training thread."""

    def __init__(
        self, wiring: Wiring, device: torch.device, settings: Settings, news: News, link: Link
    ) -> None:
        self.me = wiring.me
        self.device = device
        self.step = 0
        self.settings = settings
        self._link = link
        self._news = news
        self._rounds = Rounds(self, news, wiring, device, settings.min_workers)
        self._reducer: Reducer | None = None
        self._modules: dict[str, torch.nn.Module] = {}
        self._others: dict[str, Stateful] = {"rng": RandomState()}
        self._loaders: list[Loader] = []
        self._unclaimed = State({})
        self._checkpoints = Checkpoints(
            settings.directory / "states", settings.checkpoint.keep_last
        )
        self._stored_step = 0
        self._serial = 0  # events that all workers generate alike are numbered
        self._reports = 0
        self._unconfirmed: deque[tuple[int, Event]] = deque()
        self._confirmed = -1
        self._listeners: list[Callable[[str, int], None]] = []

    # ------------------------------------------------------------------ the group as it is

    @property
    def prepared(self) -> bool:
        """Whether `prepare` was called."""
        return self._reducer is not None

    @property
    def rank(self) -> int:
        """Place in the group; -1 before `prepare`."""
        members = self._members_now()
        return members.index(self.me) if self.me in members else -1

    @property
    def world_size(self) -> int:
        """Members of the group; 0 before `prepare`."""
        return len(self._members_now())

    @property
    def generation(self) -> int:
        """Of the group; 0 before `prepare`."""
        return self._rounds.generation

    @property
    def waiting(self) -> bool:
        """Whether the training thread is blocked until others move. Any thread may ask."""
        return self._rounds.waiting

    @property
    def waited_s(self) -> float:
        """How long it has been so, altogether. Any thread may ask."""
        return self._rounds.waited_s

    def _members_now(self) -> tuple[int, ...]:
        return self._news.members.get(self._rounds.generation, ())

    # ------------------------------------------------------------------ prepare and track

    def seed(self) -> None:
        """Equal random numbers on all workers, so that they build equal models."""
        torch.manual_seed(self.settings.seed)
        np.random.seed(self.settings.seed % 2**32)
        random.seed(self.settings.seed)

    def prepare(self, objects: Sequence[Any]) -> None:
        """Take in model, optimizer and the rest, and enter the group. Collective; blocks."""
        if self._reducer is not None:
            raise ConfigError(
                "ctx.prepare was called twice. Give it everything at once: "
                "model, optimizer = ctx.prepare(model, optimizer)."
            )
        modules = [o for o in objects if isinstance(o, torch.nn.Module)]
        if not modules:
            raise ConfigError(
                f"ctx.prepare got no torch.nn.Module, only {[type(o).__name__ for o in objects]}."
            )
        prefixes = ["", *(f"@module{i}/" for i in range(1, len(modules)))]
        self._modules = dict(zip(prefixes, (m.to(self.device) for m in modules), strict=True))
        names = states.parameter_names(self._modules)
        for other in objects:
            if isinstance(other, torch.nn.Module):
                continue
            if not isinstance(other, Stateful):
                raise ConfigError(
                    f"ctx.prepare got a {type(other).__name__}, which has no state_dict and "
                    "load_state_dict, so a joiner could not be given its state."
                )
            if isinstance(other, torch.optim.Optimizer):
                states.check_optimizer(other, names)
            self._add(_kind_of(other), other)
        self._reducer = Reducer(modules, self._rounds, self)
        self._link.ready()
        self._rounds.first_entry(_layout(self._modules))

    def track(self, objects: Mapping[str, Stateful]) -> None:
        """Make further objects part of the State, by name."""
        for name, other in objects.items():
            if not isinstance(other, Stateful):
                raise ConfigError(
                    f"ctx.track got {name}={type(other).__name__}, which has no state_dict and "
                    "load_state_dict. Nothing was tracked under that name."
                )
            if name in self._others or "/" in name:
                raise ConfigError(f"the name {name!r} is taken or has a '/'; choose another.")
            self._add(name, other)
            self._claim(name, other)

    def _add(self, name: str, other: Stateful) -> None:
        taken = sum(key.rstrip("0123456789") == name for key in self._others)
        self._others[name if not taken else f"{name}{taken}"] = other

    # ------------------------------------------------------------------ State

    def capture(self) -> State:
        """The State as it is now: views of live tensors."""
        loaders = {f"loader/{loader.number}": loader for loader in self._loaders}
        counts = {"step": self.step, "serial": self._serial, "reports": self._reports}
        state = states.capture(self._modules, {**self._others, **loaders}, counts)
        # What was given for objects that do not exist yet is passed on as it came.
        kept = self._unclaimed
        return State({**kept.tensors, **state.tensors}, {**kept.meta, **state.meta})

    def give_state(self, founding: bool) -> State:
        """For newcomers. The first founder restores the stored State, if the run has one."""
        if founding and self.settings.resume is not None:
            self._adopt(states.load(self.settings.resume))
        return self.capture()

    def adopt_state(self, state: State) -> None:
        """Become equal to a peer, but for the random numbers to come."""
        self._adopt(state)
        _diverge(self.me)

    def _adopt(self, state: State) -> None:
        states.restore(state, self._modules, self._others)
        if self._reducer is not None:
            self._reducer.rebase()
        self.step = self._stored_step = state.meta["step"]
        self._serial = state.meta["serial"]
        self._reports = state.meta["reports"]
        self._unclaimed = states.without(state, self._others)

    def _claim(self, name: str, other: Stateful) -> bool:
        """Give an object that came after `prepare` its part of the State; False if it has none."""
        if f"@{name}" not in self._unclaimed.meta:
            return False
        states.restore(self._unclaimed, {}, {name: other})
        self._unclaimed = states.without(self._unclaimed, {name: other})
        return True

    def store_state(self, reason: str) -> None:
        """Write the State to disk. Blocks this worker."""
        stored, dropped = self._checkpoints.store(self.capture(), self.step, reason)
        self._stored_step = self.step
        for event in (stored, *dropped):
            self._link.emit(event)

    # ------------------------------------------------------------------ Participant of Rounds

    def entered(self, generation: int, joined: tuple[float, int] | None) -> None:
        """In the group of `generation`, with the State."""
        self._link.entered(generation)
        if joined is not None and self.step > 0:
            copy_s, copy_bytes = joined
            self._link.emit(
                WorkerJoined(
                    worker=self.me,
                    generation=generation,
                    step=self.step,
                    copy_s=copy_s,
                    copy_bytes=copy_bytes,
                )
            )
        if self.rank == 0:  # the one before may have died before it told the journal everything
            for serial, event in self._unconfirmed:
                self._link.emit(event, serial)

    def recovered(self, recovery: Recovery) -> None:
        """Through with a change of the group."""
        self._link.emit(
            Recovered(
                worker=self.me,
                generation=recovery.generation,
                step=self.step + (recovery.kind == Reducer.kind),
                outcome=recovery.outcome,
                rebuild_s=recovery.rebuild_s,
                stall_s=recovery.stall_s,
            )
        )

    def doubt(self, generation: int, error: BaseException) -> None:
        """An operation failed."""
        self._link.doubt(generation, error)

    def phase(self, name: str, detail: int) -> None:
        """Where the training thread is."""
        self._link.phase(name, detail)
        for listener in self._listeners:
            listener(name, detail)

    def on_phase(self, listener: Callable[[str, int], None]) -> None:
        """Call `listener` at each phase from now on."""
        self._listeners.append(listener)

    # ------------------------------------------------------------------ Steps of the Reducer

    def weight(self) -> Weight:
        """Samples of this worker and of all in the step in hand; one each without loaders."""
        weights = [loader.weight for loader in self._loaders]
        mine, total = (sum(column) for column in zip(*weights, strict=True)) if weights else (0, 0)
        return Weight(mine, total) if total else Weight(1, self.world_size)

    def ballot(self) -> torch.Tensor:
        """What goes into the commit round, reduced by maximum.

        The proposal that this worker knows, with both signs: equal extremes mean that all know the
        same. And how far the journal has got, from the one who writes it.
        """
        proposal = self._rounds.proposal()
        return torch.tensor([proposal, -proposal, self._link.journaled() if self.rank == 0 else -1])

    def committed(self, left: Left) -> None:
        """A step counts."""
        highest, lowest, journaled = (int(value) for value in left.result)
        self._rounds.step_left(left, highest if highest == -lowest else 0)
        self.step += 1
        contributors = self._rounds.members(left.complete)
        batches = [batch for loader in self._loaders for batch in loader.commit(contributors)]
        self._emit_alike(
            StepCommitted(
                step=self.step,
                generation=left.complete,
                world_size=len(contributors),
                batches=tuple(batches),
            )
        )
        self._confirmed = max(self._confirmed, journaled)
        while self._unconfirmed and self._unconfirmed[0][0] <= self._confirmed:
            self._unconfirmed.popleft()

    def _emit_alike(self, event: Event) -> None:
        """An event that every worker generates: rank 0 sends it, the others can step in."""
        serial = self._serial
        self._serial += 1
        self._unconfirmed.append((serial, event))
        if self.rank == 0:
            self._link.emit(event, serial)

    # ------------------------------------------------------------------ Pace of the Loaders

    def boundary(self) -> None:
        """Between two steps: joiners enter, checkpoints are taken. Nothing within one."""
        if any(loader.pending for loader in self._loaders):
            return  # a further micro-batch of a step, or a second loader
        self.phase("boundary", self.step)
        self._rounds.boundary()
        every = self.settings.checkpoint.every_steps
        due = every is not None and self.step % every == 0 and self.step > self._stored_step
        if due and self.rank == 0:
            self.store_state("every_steps")

    def members(self) -> tuple[int, ...]:
        """The workers over which the next batch is split."""
        return self._rounds.members(self._rounds.plan)

    def drawn(self, share: int) -> None:
        """A batch begins."""
        if not share and self._reducer is not None:
            self._reducer.hold_buffers()
        self.phase("batch", self.step)

    def planned(self, loader: int, epochs: int) -> None:
        """So many epochs are meant to be made. For progress bars; may get lost with rank 0."""
        if self.rank == 0:
            self._link.emit(EpochsPlanned(loader=loader, epochs=epochs))

    # ------------------------------------------------------------------ what Context offers

    def open_loader(self, source: Source) -> Loader:
        """A loader that goes on where the State says.

        Raises:
            ConfigError: fewer samples in a batch than workers, or another dataset than before.
        """
        if source.batch_size < self.world_size:
            raise ConfigError(
                f"a global batch of {source.batch_size} cannot be split over {self.world_size} "
                "workers. No loader was made. batch_size is that of the whole group; raise it, or "
                "use fewer workers."
            )
        loader = Loader(len(self._loaders), source, self)
        if not self._claim(f"loader/{loader.number}", loader):
            self._emit_alike(loader.opened())
        self._loaders.append(loader)
        return loader

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Defer the step."""
        if self._reducer is None:
            raise ConfigError("ctx.accumulate was used before ctx.prepare.")
        with self._reducer.deferred():
            yield

    def evaluate(
        self,
        metric: Metric,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate,
    ) -> dict[str, float]:
        """Means of a metric over a dataset that the group shares out. Collective."""
        work = Evaluation(self._modules[""], metric, dataset, batch_size, collate, self.device)
        self.phase("evaluate", self.step)
        sums = self._rounds.run(work).result.tolist()
        return {name: total / sums[0] for name, total in zip(work.names, sums[1:], strict=True)}

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Hand metrics to the journal."""
        event = Reported(seq=self._reports, step=self.step, metrics=dict(metrics))
        self._reports += 1
        self._emit_alike(event)

    def finish(self) -> None:
        """After the train function: the final State is stored, and all are through. Collective."""
        self._rounds.run(_Finish(self))


class _Finish:
    """The last operation: whoever is rank 0 stores the final State before anybody leaves."""

    kind = 3
    reduce: Reduce = "max"

    def __init__(self, member: Member) -> None:
        self._member = member

    def launch(self, group: Group) -> Sequence[Pending]:
        """Nothing but the round."""
        del group
        return ()

    def payload(self, group: Group) -> torch.Tensor:
        """Nothing to tell; that all are here is enough."""
        if group.rank == 0:
            self._member.store_state("final")
        return torch.zeros(1)


def _kind_of(other: Stateful) -> str:
    if isinstance(other, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(other, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    return "scaler" if isinstance(other, torch.amp.GradScaler) else type(other).__name__.lower()


def _layout(modules: Mapping[str, torch.nn.Module]) -> list[str]:
    lines = []
    for prefix, module in modules.items():
        for kind, named in (
            ("parameter", module.named_parameters()),
            ("buffer", module.named_buffers()),
        ):
            for name, tensor in named:
                frozen = "" if tensor.requires_grad or kind == "buffer" else ", frozen"
                dtype = states.dtype_name(tensor)
                lines.append(f"{kind} {prefix}{name} {dtype}{list(tensor.shape)}{frozen}")
    return lines


def _diverge(worker: int) -> None:
    """Give this worker random numbers of its own: equal dropout masks on all would be a waste."""
    material = torch.get_rng_state().numpy().tobytes() + str(worker).encode()
    seed = int.from_bytes(blake3(material).digest(8)) >> 1
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)

"""The objects that a train function gave a worker, by name: what its State is captured from.

Some come late. A loader, or what `ctx.track` names, may be made after the State has come; its part
of it is kept until then. Not here: where a State comes from, or goes to (worker_state).

Invariant: what a State holds for objects that do not exist yet is passed on as it came.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from elastix import state as states
from elastix import state_entries
from elastix.comm.gradients.buffer_bucket import overlaps
from elastix.data.cursor import count
from elastix.data.loader import Loader
from elastix.data.random_numbers import RandomState
from elastix.data.rehearsal import ENTRY, Rehearsal
from elastix.data.source import Source
from elastix.errors import ConfigError, StateError
from elastix.nested_state import unflatten
from elastix.sharding import fsdp_layers, is_sharded, let_go_of_gathered, local, named_part
from elastix.state import State, Stateful
from elastix.state_entries import OUTER
from elastix.train.checkpoint import state_digests
from elastix.train.replica.learning_rate import hold_at_end
from elastix.train.replica.outlines import same

_PASSING = "@passing buffers/"
"""What names begin with, in a State on its way to who joins, that are in no State that is kept."""
_NAMED = 3  # tensors, in a message


class TrackedObjects:
    """See the module.

    Attributes:
        modules: by the prefix of their tensors; the model has the empty one.
        others: optimizers, schedulers and whatever else, by name; the random numbers too.
        loaders: in the order in which they were made.
        memories: what they rehearse from, in the order in which it was first used.
        staged: modules are a stage of a model, of which other processes have the rest.
        whole: names of all parameters of that model.
        void: the last step was; whatever gradients there are, no optimizer of these moves.
        spared: ids of parameters that it moves all the same, by those of a step before it.
        before_step: called with one of these optimizers before it takes a step, and whether that
            step has a closure; may raise.
        after_step: called after that.
        before_held_step: the same, with one that another of these objects holds.
        before_unprepared_step: called with one that is no part of this; may raise.
    """

    def __init__(self) -> None:
        self.modules: dict[str, torch.nn.Module] = {}
        self.others: dict[str, Stateful] = {"rng": RandomState()}
        self.loaders: list[Loader] = []
        self.memories: list[Rehearsal] = []
        self.staged = self.void = False
        self.spared: set[int] = set()
        self.whole: frozenset[str] = frozenset()
        self.before_step: Callable[[torch.optim.Optimizer, bool], None] = lambda *_: None
        self.after_step: Callable[[], None] = lambda: None
        self.before_held_step: Callable[[torch.optim.Optimizer, bool], None] = lambda *_: None
        self.before_unprepared_step: Callable[[torch.optim.Optimizer], None] = lambda _: None
        self._outer: torch.optim.Optimizer | None = None
        self._groups: dict[torch.optim.Optimizer, int] = {}  # how many each was given with
        self._options: dict[torch.optim.Optimizer, list[dict[str, Any]]] = {}  # until `set_out`
        self._unclaimed = State({})
        self._placed = False  # that is of an ancestor, in whose place this run begins

    @property
    def model(self) -> torch.nn.Module:
        """The first module."""
        return self.modules[""]

    @property
    def every_module(self) -> list[torch.nn.Module]:
        """The prepared ones, and those that were tracked, as averages of weights are."""
        tracked = (o for o in self.others.values() if isinstance(o, torch.nn.Module))
        return [*self.modules.values(), *tracked]

    @property
    def passes(self) -> float:
        """Over the data of the first loader, or of the one that the State knows of; 0 without."""
        if self.loaders:
            cursor = self.loaders[0].cursor
            position, owed, length = cursor.position, cursor.owed, cursor.length
        elif "@loader/0" in self._unclaimed.meta:
            kept = self._unclaimed.meta["@loader/0"]
            position, owed, length = kept["position"], kept["owed"], kept["length"]
        else:
            return 0.0
        return float((position - count(owed)) / length)

    @property
    def sharded(self) -> bool:
        """Whether there is anything of which this process holds a part."""
        if self.staged:
            return True
        modules = self.modules.values()
        return any(is_sharded(tensor) for module in modules for tensor in module.parameters())

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The first one that is at work."""
        scalers = (o for o in self.others.values() if isinstance(o, torch.amp.GradScaler))
        return next((scaler for scaler in scalers if scaler.is_enabled()), None)

    def prepare(self, objects: Sequence[Any], device: torch.device) -> bool:
        """Take in model, optimizer and the rest; modules go to the device.

        Returns:
            Whether there were gradients, of a pass before. They are in no State, so nobody keeps
            them: whoever joins, or goes on from a stored State, would add them once more.

        Raises:
            ConfigError: there is no module, or an object could not be given to a joiner.
        """
        modules = [o for o in objects if isinstance(o, torch.nn.Module)]
        if not modules:
            raise ConfigError(
                f"ctx.prepare got no torch.nn.Module, only {[type(o).__name__ for o in objects]}."
            )
        for module in modules:
            _check_elements(module)
        prefixes = state_entries.prefixes(len(modules))
        self.modules = dict(zip(prefixes, (m.to(device) for m in modules), strict=True))
        names = states.parameter_names(self.modules)
        for other in objects:
            if isinstance(other, torch.nn.Module):
                continue
            if isinstance(other, Rehearsal):
                raise ConfigError(
                    "ctx.prepare got a Rehearsal. Nothing was prepared. Give it to the loaders: "
                    "ctx.loader(dataset, batch_size, rehearse=memory) makes it part of the State."
                )
            if not isinstance(other, Stateful):
                raise ConfigError(
                    f"ctx.prepare got an object ({type(other).__name__}) without state_dict and "
                    "load_state_dict, so a joiner could not be given its state. Nothing was "
                    "prepared. Give it modules, optimizers, schedulers and the like."
                )
            if isinstance(other, torch.optim.SparseAdam):
                raise ConfigError(
                    "ctx.prepare got a SparseAdam, which takes sparse gradients only; averaged "
                    "over workers they are dense. Nothing was prepared. Use Adam, with "
                    "sparse=False in the embedding; SGD and Adagrad take sparse=True."
                )
            self._add(self._free_name(state_digests.kind_of(other)), other)
        for other in self.others.values():  # those that were tracked before
            if isinstance(other, torch.optim.Optimizer):
                states.check_optimizer(other, names)
        _watch_optimizers(self)
        return drop_gradients(modules)

    def has(self, kind: type[torch.nn.Module]) -> bool:
        """Whether one of the modules is of that kind, or has one in it."""
        parts = (part for module in self.modules.values() for part in module.modules())
        return any(isinstance(part, kind) for part in parts)

    def close(self) -> None:
        """The run is over: steps of optimizers in this process are no affair of it any more."""
        _unwatch(self)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """That an optimizer that is about to take a step is part of the State.

        Raises:
            ConfigError: it changes prepared parameters and is not; or it is, and changes others.
        """
        if any(optimizer is other for other in self.others.values()):
            names = states.parameter_names(self.modules)
            states.check_optimizer(optimizer, names, "No step was taken; the run ends.")
            known = self._groups.get(optimizer, len(optimizer.param_groups))
            if len(optimizer.param_groups) != known:
                raise ConfigError(
                    f"the {type(optimizer).__name__} has {len(optimizer.param_groups)} groups of "
                    f"parameters, and had {known} when it was given to ctx.prepare or ctx.track: "
                    "whoever joins, or goes on from a stored State, has the latter, and could "
                    "not take over its state. No step was taken; the run ends. Give it all groups "
                    "before, and freeze after ctx.prepare what is not to be trained yet."
                )
            return
        if any(optimizer is held for other in self.others.values() for held in _held(other)):
            return
        prepared = states.parameter_names(self.modules)
        if any(id(p) in prepared for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"an optimizer ({type(optimizer).__name__}) that was not prepared is about to "
                "change prepared parameters. A joiner, and a run that is continued, would not have "
                "its moments. No step was taken. Give it to ctx.prepare with its model; one that "
                "is made later, to ctx.track(optimizer2=optimizer)."
            )

    def keep_outer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in the optimizer of outer steps. The others' state is each worker's own then.

        Raises:
            ConfigError: its name is taken.
        """
        if OUTER in self.others:
            raise ConfigError(
                f"the name {OUTER!r} is that of the optimizer of outer steps. Nothing was prepared."
                " Track your object under another name."
            )
        self.others[OUTER] = self._outer = optimizer

    @property
    def own(self) -> tuple[str, ...]:
        """Names of `others` whose state need not be that of other workers."""
        if self._outer is None:
            return ()
        kinds = torch.optim.Optimizer | torch.amp.GradScaler
        mine = {name: other for name, other in self.others.items() if other is not self._outer}
        return tuple(name for name, other in mine.items() if isinstance(other, kinds))

    def track(self, objects: Mapping[str, Stateful]) -> dict[str, Stateful]:
        """Take in further objects by name, and give them their part of the State.

        Returns:
            Those that this run begins with, and does not go on with.

        Raises:
            ConfigError: it has no state, an optimizer has parameters that were not prepared, or the
                name is taken.
        """
        names, begun = states.parameter_names(self.modules), {}
        for name, other in objects.items():
            if not isinstance(other, Stateful):
                raise ConfigError(
                    f"ctx.track got {name}={type(other).__name__}, which has no state_dict and "
                    "load_state_dict. Nothing was tracked under that name."
                )
            if name in self.others or "/" in name or name.startswith(ENTRY):
                raise ConfigError(
                    f"ctx.track got the name {name!r}, which is taken or has a '/'. Nothing was "
                    "tracked under that name. Choose another."
                )
            if isinstance(other, torch.optim.Optimizer) and self.modules:
                states.check_optimizer(other, names, "Nothing was tracked under that name.")
            self._add(name, other)
            if not self._claim(name, other) or self._placed:
                begun[name] = other
        return begun

    def open(self, loader: Loader) -> bool:
        """Take in a loader; whether the State had a part for it, which it goes on from."""
        self.remember(loader.source)
        known = self._claim(f"loader/{loader.number}", loader)
        self.loaders.append(loader)
        return known

    def remember(self, source: Source) -> None:
        """Take in what a loader rehearses."""
        memory = source.memory
        if memory is None:
            return
        if not any(memory.rehearsal is known for known in self.memories):
            memory.rehearsal.check_fresh(memory.number)
            self.memories.append(memory.rehearsal)
            self._claim(list(self._remembered)[-1], memory.rehearsal)
        memory.rehearsal.open(memory.number)

    @property
    def _remembered(self) -> dict[str, Rehearsal]:
        return {f"{ENTRY}{number or ''}": memory for number, memory in enumerate(self.memories)}

    def _add(self, name: str, other: Stateful) -> None:
        hold_at_end(other)
        if isinstance(other, torch.optim.Optimizer):
            self._groups[other] = len(other.param_groups)
        self.others[name] = other

    def _free_name(self, kind: str) -> str:
        """For a further object of a kind: optimizer, optimizer1 and so on."""
        number = sum(key.rstrip("0123456789") == kind for key in self.others)
        while (name := f"{kind}{number or ''}") in self.others:
            number += 1
        return name

    def capture(self, counts: Mapping[str, Any]) -> State:
        """The State as it is now: views of live tensors, with `counts` among the metadata."""
        let_go_of_gathered(self.modules.values())
        return _beside(self._unclaimed, states.capture(self.modules, self._all_others, counts))

    def hold(self, counts: Mapping[str, Any]) -> Callable[[], State | None]:
        """What gives the State as it is now, as long as its tensors are; see state.HeldState."""
        let_go_of_gathered(self.modules.values())
        held = states.HeldState(self.modules, self._all_others, counts)
        unclaimed = self._unclaimed

        def state() -> State | None:
            found = held.state()
            return None if found is None else _beside(unclaimed, found)

        return state

    @property
    def _all_others(self) -> dict[str, Stateful]:
        loaders = {f"loader/{loader.number}": loader for loader in self.loaders}
        return {**self.others, **self._remembered, **loaders}

    def adopt(self, state: State) -> None:
        """Become as `state` says; what it has for objects to come is kept for them.

        Raises:
            StateError: it does not fit.
        """
        there = self.others
        if f"@{OUTER}" not in state.meta:  # of a run that has exchanged gradients so far
            there = {name: other for name, other in there.items() if name != OUTER}
        try:
            if self.staged:
                self._look_for_stages(state)
                state = state_entries.of_stage(
                    state, set(states.parameter_names(self.modules).values())
                )
            else:
                self._look_for_tensors(state)
            states.restore(state, self.modules, there)
        except StateError as error:
            raise StateError(
                f"{error} The run goes on from a State that another train function or config has "
                "stored. To begin anew choose another RunConfig.name, or remove the run: `elastix "
                "runs rm NAME`; to go on give the model and the optimizer that it was stored with."
            ) from error
        self._keep_options(self.optimizers)
        self._unclaimed, self._placed = state_entries.without(state, self.others), False
        # A joiner that began anew in the middle of its loop has some of these.
        for name, memory in self._remembered.items():
            self._claim(name, memory)
        for loader in self.loaders:
            self._claim(f"loader/{loader.number}", loader)

    def _look_for_stages(self, state: State) -> None:
        """As one process whose optimizer lacks them: they would not be in what is stored next."""
        lost = state_entries.without_stage(state, self.whole)
        if lost:
            raise StateError(
                f"the State has trained {len(lost)} parameters, {lost[0]!r} among them, that are "
                "at no stage of the axis 'pipe' here."
            )

    def _look_for_tensors(self, state: State) -> None:
        """As one that no module here has: it would not be in what is stored next."""
        known = {prefix + n for prefix, module in self.modules.items() for n in module.state_dict()}
        lost = [n for n in state.tensors if n not in known and state_entries.is_of_module(n, state)]
        if lost:
            more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
            raise StateError(
                "the State holds tensors that no module given to ctx.prepare has: "
                f"{', '.join(lost[:_NAMED])}{more}."
            )

    def for_joiners(self, state: State) -> State:
        """The State as it is now, and the buffers of modules that torch keeps in none."""
        passing = {_PASSING + name: local(buffer) for name, buffer in self._passing.items()}
        return replace(state, tensors={**state.tensors, **passing})

    def take_passing(self, state: State) -> State:
        """Have those buffers as they are in a State that `for_joiners` gave; the State itself."""
        if not any(name.startswith(_PASSING) for name in state.tensors):
            return state  # a stored one, whose tensors may be read when they are asked for
        with torch.no_grad():
            for name, buffer in self._passing.items():
                given = state.tensors.get(_PASSING + name)
                if given is None or given.shape != local(buffer).shape:
                    continue
                if not same(local(buffer), given):  # one that was expanded cannot be written to
                    local(buffer).copy_(given)
        kept = {n: t for n, t in state.tensors.items() if not n.startswith(_PASSING)}
        return replace(state, tensors=kept)

    @property
    def _passing(self) -> dict[str, torch.Tensor]:
        """Buffers that are not persistent: a schedule that the loop follows in the model, say."""
        return {
            f"{prefix}{path}.{name}": buffer
            for prefix, module in self.modules.items()
            for path, part in module.named_modules()
            for name in sorted(part._non_persistent_buffers_set)
            if (buffer := part._buffers.get(name)) is not None
        }

    def take_tensors(self, state: State) -> None:
        """Become as `state` says where it has tensors, but for loaders and random numbers."""
        named = {name[1:].split("/")[0] for name in state.tensors if name.startswith("@")}
        others = {name: other for name, other in self.others.items() if name in named}
        others.pop("rng", None)
        states.restore(state, self.modules, others)

    def put_back(self, state: State) -> None:
        """Become as `state` says once more, but for loaders and random numbers, which go on."""
        others = {n: o for n, o in self.others.items() if f"@{n}" in state.meta and n != "rng"}
        states.restore(state, self.modules, others)

    def take_place(self, state: State, inherited: Mapping[str, str], *, whole: bool) -> None:
        """Go on where an ancestor stands; see `state.take_place`.

        What its State has for loaders, and for objects to come, is kept for them. Further modules
        are as they are there, with what optimizers have gathered on them, unless they were made
        for another model: then their shapes differ.

        Args:
            state: the ancestor's.
            inherited: tensors of the model, by name, with their names there.
            whole: all of the model was inherited. Otherwise only optimizers, schedulers, loaders
                and random numbers follow it: the rest was made for another model.
        """
        further = self._take_modules(state)
        if further:
            states.warm_start(self.modules, self.others, state, {**inherited, **further})
        follow = torch.optim.Optimizer | LRScheduler | RandomState
        others = {
            n: other for n, other in self.others.items() if whole or isinstance(other, follow)
        }
        states.take_place(state, others)
        if whole:
            _take_extra(state, "", self.model)
        rest = state_entries.without(state, self.others)
        self._unclaimed = rest if whole else state_entries.entries_of(rest, "loader/")
        self._placed = True

    def _take_modules(self, state: State) -> dict[str, str]:
        """What further modules have taken over, by name; each does so as a whole or not at all."""
        taken: dict[str, str] = {}
        for prefix, module in self.modules.items():
            named = module.state_dict(keep_vars=True).items()
            live = {prefix + name: one for name, one in named if isinstance(one, torch.Tensor)}
            there = {name: state.tensors[name] for name in live if name in state.tensors}
            shapes = {name: one.shape for name, one in there.items()}
            if not prefix or shapes != {name: one.shape for name, one in live.items()}:
                continue
            with torch.no_grad():
                for name, one in live.items():
                    one.copy_(there[name])
            _take_extra(state, prefix, module)
            taken |= {name: name for name in live}
        return taken

    def _claim(self, name: str, other: Stateful) -> bool:
        """Give an object its part of the State; False if that has none."""
        if f"@{name}" not in self._unclaimed.meta:
            return False
        if self._placed and isinstance(other, torch.optim.Optimizer | LRScheduler):
            states.take_place(self._unclaimed, {name: other})  # under options of its own
        else:
            states.restore_others(self._unclaimed, self.modules, {name: other})
            self._put_options_back(other)
        self._unclaimed = state_entries.without(self._unclaimed, {name: other})
        return True

    def _keep_options(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Those of their groups are as the State has them."""
        for optimizer in optimizers:
            self._options[optimizer] = [
                {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            ]

    def _put_options_back(self, claimed: Stateful) -> None:
        """A scheduler that is made when the State has come has begun its optimizer's rates anew."""
        if isinstance(claimed, torch.optim.Optimizer):
            self._keep_options([claimed])
        if not isinstance(claimed, LRScheduler) or claimed.optimizer not in self._options:
            return
        kept = self._options[claimed.optimizer]
        for group, options in zip(claimed.optimizer.param_groups, kept, strict=True):
            for key, value in options.items():
                if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = copy.deepcopy(value)

    def set_out(self) -> None:
        """A step begins: what optimizers have for options from here on is the train function's."""
        self._options.clear()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those among `others`."""
        return [o for o in self.others.values() if isinstance(o, torch.optim.Optimizer)]

    def optimized(self, parameter: torch.nn.Parameter) -> bool:
        """Whether an optimizer has this parameter."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return any(parameter is held for group in groups for held in group["params"])

    def held(self) -> set[int]:
        """Ids of the parameters that an optimizer of the train function holds."""
        kept = [one for other in self.others.values() for one in _held(other)]
        optimizers = [o for o in kept if isinstance(o, torch.optim.Optimizer)]
        mine = (optimizer for optimizer in optimizers if optimizer is not self._outer)
        groups = (group for optimizer in mine for group in optimizer.param_groups)
        return {id(parameter) for group in groups for parameter in group["params"]}

    def late(self, state: State) -> set[str]:
        """Tensors of the State that an optimizer holds: its own step changes them, if any code."""
        optimizers = {n: o for n, o in self.others.items() if isinstance(o, torch.optim.Optimizer)}
        inner = (optimizer for optimizer in optimizers.values() if optimizer is not self._outer)
        groups = (group for optimizer in inner for group in optimizer.param_groups)
        held = {id(parameter) for group in groups for parameter in group["params"]}
        late = {
            prefix + name
            for prefix, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in held
        }
        prefixes = tuple(f"@{name}/" for name in optimizers)
        return late | {entry for entry in state.tensors if entry.startswith(prefixes)}


def _beside(unclaimed: State, state: State) -> State:
    """The State, and what is kept for objects to come."""
    return State(
        {**unclaimed.tensors, **state.tensors},
        {**unclaimed.meta, **state.meta},
        parts={**unclaimed.parts, **state.parts},
    )


def _held(other: Stateful) -> list[Any]:
    """What is part of the State with `other`: itself, and what an object of the user's keeps."""
    if isinstance(other, torch.optim.Optimizer | LRScheduler):
        return [other]  # a scheduler knows its optimizer, and does not keep it
    kept: list[Any] = [other]
    for value in vars(other).values() if hasattr(other, "__dict__") else ():
        if isinstance(value, Mapping):
            kept += value.values()
        else:
            kept += value if isinstance(value, list | tuple | set) else [value]
    return [one for one in kept if isinstance(one, torch.optim.Optimizer)]


def drop_gradients(modules: Iterable[torch.nn.Module]) -> bool:
    """Leave parameters without gradients, as a step begins; whether there were any."""
    found = [p for module in modules for p in module.parameters() if p.grad is not None]
    for parameter in found:
        parameter.grad = None
    return bool(found)


def _watch_optimizers(live: TrackedObjects) -> None:
    """Have each optimizer of this process looked at before its first step, as long as `live` is.

    And before the next one when it has got further groups of parameters.
    """
    reference = weakref.ref(live)
    seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
    layers: list[weakref.ref[Any]] = []  # that FSDP2 shards; torch keeps what is below

    def before_step(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        alive = reference()
        if alive is None:
            return None
        fresh = seen.get(optimizer) != len(optimizer.param_groups)
        if fresh:  # models are sharded by now: they are not looked through at every step
            layers[:] = map(weakref.ref, fsdp_layers(alive.modules.values()))
        for sharded in layers:  # else parameters are those that a forward pass has gathered since
            if (layer := sharded()) is not None:
                layer.reshard()
        if fresh:
            alive.check_optimizer(optimizer)
            seen[optimizer] = len(optimizer.param_groups)
        closure = any(map(callable, (*args[1:], *kwargs.values())))
        if any(optimizer is other for other in alive.others.values()):
            alive.before_step(optimizer, closure)
        elif any(optimizer is one for other in alive.others.values() for one in _held(other)):
            alive.before_held_step(optimizer, closure)
        else:
            alive.before_unprepared_step(optimizer)
            return None
        let_go = partial(_let_go_if_void, reference, weakref.ref(optimizer))
        let_go()
        if not closure:
            return None
        given = [_followed(value, let_go) if callable(value) else value for value in args[1:]]
        named = {k: _followed(v, let_go) if callable(v) else v for k, v in kwargs.items()}
        return (args[0], *given), named

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401
        alive = reference()
        if alive is not None and any(optimizer is other for other in alive.others.values()):
            alive.after_step()

    # Those of earlier runs in this process are removed here. Within a step they could not be:
    # torch goes through them just then.
    _unwatch(None)
    _watching.append((reference, register_optimizer_step_pre_hook(before_step)))
    _watching.append((reference, register_optimizer_step_post_hook(after_step)))


def _let_go_if_void(
    tracked: weakref.ref[TrackedObjects], optimizer: weakref.ref[torch.optim.Optimizer]
) -> None:
    """Leave an optimizer without gradients, of which it would make something, in a void step."""
    alive, taking = tracked(), optimizer()
    if alive is None or taking is None or not alive.void:
        return
    for group in taking.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in alive.spared:
                parameter.grad = None


def _followed(closure: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    """A closure of an optimizer's step, after whose pass something is to be done."""

    @wraps(closure)
    def both(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as it was given
        loss = closure(*args, **kwargs)
        then()
        return loss

    return both


def _unwatch(over: TrackedObjects | None) -> None:
    """Remove the hooks of a run that is over, and of those that nobody refers to."""
    for pair in list(_watching):
        alive, hook = pair[0](), pair[1]
        if alive is None or alive is over:
            hook.remove()
            _watching.remove(pair)


_watching: list[tuple[weakref.ref[TrackedObjects], RemovableHandle]] = []


def _check_elements(module: torch.nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"{name} of {type(module).__name__} is on the device meta and has no elements. "
                "Nothing was prepared. Give it some before ctx.prepare: module.to_empty(device=...)"
            )
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor) and named_part(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} has a tensor {name!r}, which in a store is the name of a "
                "part of another one. Nothing was prepared. Give it a name that does not end in "
                "numbers in brackets."
            )
        if isinstance(tensor, torch.Tensor) and overlaps(tensor):
            raise ConfigError(
                f"{name} of {type(module).__name__} was expanded: several of its elements are one "
                "place in memory, so it cannot be given to a worker that joins. Nothing was "
                "prepared. Give the module a copy that has all of its elements: tensor.clone()"
            )


def _take_extra(ancestor: State, prefix: str, module: torch.nn.Module) -> None:
    """Give modules what those of the same names in an ancestor keep besides tensors."""
    for name, part in module.named_modules():
        key = f"@{prefix}{name}{'.' if name else ''}_extra_state"
        if key in ancestor.meta:
            part.set_extra_state(unflatten(ancestor.meta[key], ancestor.tensors))

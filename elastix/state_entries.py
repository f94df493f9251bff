"""Entries of a State: which are of a stage, or of some kinds of objects, and those of all stages.

A State taken apart and put together as data, without any live object. Its optimizers' entries are
keyed by parameter name, which is what makes that possible.

Not here: how live objects become a State and are restored from one (state).
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from elastix.state import BY_PARAMETER, State

OUTER = "outer_optimizer"
"""Under which name the optimizer of outer steps is in a State."""
_EXTRA = re.compile(r"@([^@/]+\.)?_extra_state")
"""What a State has under the name of a module's `get_extra_state`; not those of further models."""

_FURTHER = re.compile(r"@module\d+")
"""What names of tensors of further modules begin with."""


def prefixes(modules: int) -> list[str]:
    """What the names of tensors begin with, for each of so many modules."""
    return ["", *(f"@module{number}/" for number in range(1, modules))]


def is_of_module(name: str, state: State) -> bool:
    """Whether an entry is a tensor of a module, and not of an object that is called like one."""
    if not name.startswith("@"):
        return True
    owner = name.split("/")[0]
    return _FURTHER.fullmatch(owner) is not None and owner not in state.meta


def without_stage(state: State, names: Collection[str]) -> list[str]:
    """Parameters of a State's optimizers that are not among these."""
    optimizers = filter(is_optimizer, state.meta.values())
    groups = [group for value in optimizers for group in value["param_groups"]]
    return sorted({name for group in groups for name in group["params"]}.difference(names))


def of_stage(state: State, names: Collection[str]) -> State:
    """A State whose optimizers have no other parameters than these."""
    meta = dict(state.meta)
    for key, value in state.meta.items():
        if is_optimizer(value):
            others = {name for group in value["param_groups"] for name in group["params"]} - {
                *names
            }
            groups = [_narrowed(group, names.__contains__) for group in value["param_groups"]]
            slots = {key: slot for key, slot in value["state"].items() if key not in others}
            meta[key] = {**value, "state": slots, "param_groups": groups}
    return State(state.tensors, meta, state.parents, state.parts)


def _narrowed(group: Mapping[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """A group of parameters with those that are wanted."""
    places = [place for place, name in enumerate(group["params"]) if wanted(name)]
    lists = {key: [group[key][place] for place in places] for key in BY_PARAMETER if key in group}
    return {**group, **lists}


def is_optimizer(value: Any) -> bool:  # noqa: ANN401 - of a State's metadata
    """Whether it is what a State has of an optimizer."""
    if not isinstance(value, Mapping):
        return False
    groups, slots = value.get("param_groups"), value.get("state")
    in_groups = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    return in_groups and isinstance(slots, Mapping) and "$items" not in slots


def meta_of_stages(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Metadata of a whole State from those of the places of a crew; the first one's count.

    Optimizers have the parameters of all stages, group by group.
    """
    whole = dict(stages[0])
    for meta in stages[1:]:
        for key, value in meta.items():
            known = whole.setdefault(key, value)
            both = known != value and is_optimizer(known) and is_optimizer(value)
            if both and len(known["param_groups"]) == len(value["param_groups"]):
                whole[key] = _both(known, value)
    return whole


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of an optimizer, and what a further stage has of other parameters."""
    known = {name for group in one["param_groups"] for name in group["params"]}
    groups = []
    for here, there in zip(one["param_groups"], other["param_groups"], strict=True):
        fresh = _narrowed(there, lambda name: name not in known)
        lists = {key: [*here[key], *fresh.get(key, ())] for key in BY_PARAMETER if key in here}
        groups.append({**here, **lists})
    slots = {name: slot for name, slot in other["state"].items() if name not in known}
    return {**one, "state": {**one["state"], **slots}, "param_groups": groups}


def model_of(state: State) -> State:
    """The first model of a State alone, with what its modules keep besides tensors."""
    meta = {name: value for name, value in state.meta.items() if _EXTRA.fullmatch(name)}
    extra = tuple(f"@extra/{name[1:]}" for name in meta)
    chosen = [name for name in state.tensors if name[:1] != "@" or name.startswith(extra)]
    tensors = {name: state.tensors[name] for name in chosen}
    parts = {name: held for name, held in state.parts.items() if name in tensors}
    return State(tensors, meta, parts=parts)


def without(state: State, others: Iterable[str]) -> State:
    """What a State holds beside the model, less the entries of `others`."""
    given = set(others)
    return _entries(state, lambda name: name not in given)


def entries_of(state: State, *kinds: str) -> State:
    """What a State holds of these kinds of objects.

    "optimizer" is that of all optimizers, by whatever names, but for the one of outer steps.
    """

    def wanted(name: str) -> bool:
        if name.rstrip("0123456789") in kinds:
            return True
        return "optimizer" in kinds and name != OUTER and is_optimizer(state.meta[f"@{name}"])

    return _entries(state, wanted)


def _entries(state: State, wanted: Callable[[str], bool]) -> State:
    names = [key for key in state.meta if key.startswith("@") and wanted(key[1:])]
    tensors = {
        name: state.tensors[name]  # others are not read, where they are read when asked for
        for name in state.tensors
        if any(name.startswith(key + "/") for key in names)
    }
    parts = {name: held for name, held in state.parts.items() if name in tensors}
    return State(tensors, {key: state.meta[key] for key in names}, parts=parts)

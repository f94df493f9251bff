"""What replicas have in common, and what they must not."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3

from elastix.data.random_numbers import seed_generators
from elastix.state import BY_PARAMETER, Manifest, State, Stateful
from elastix.state_entries import is_optimizer

SEQUENCE = "serial"
"""Under which name States have the sequence number, from the first version on."""
_OWN = "rng"
"""Each worker has random numbers of its own, or all would draw the same dropout masks."""


_OF_THE_WAY = {
    SEQUENCE: "events sent: those of losses and joins are counted too",
    "stored_step": "checkpoints may go by the clock",
    "voids": "steps that were tried in vain, for whatever reason",
    "window": "ratios in which batches are split over workers; there are none in slices",
    "sentinel": "what is hashed when goes by the length of steps",
    "turns": "in which order loaders were drawn, to be compared after a stop",
    "frozen": "which parameters required no gradient at the boundary: the loop sets it after that",
    "disputed": "a slice that has to be computed again",
    "reports": "those of void steps are counted too",
    "run": "its name",
    "ended": "the train function was through",
    "at_boundary": "it was captured at a boundary",
    "exact": "what it was computed with",
}
_OF_PARTS = {
    "@loader/": {"paces": "how fast workers are, and whose slices follow from it"},
    "guard": {"void": "a batch that is left out is not void again", "steps": "void ones count"},
}


def digests(state: State) -> dict[str, str]:
    """Of each part of a State that replicas have in common, by its name: equal for equal replicas.

    See manifests.
    """
    return {part: found.ref for part, found in manifests(state).items()}


def manifests(state: State) -> dict[str, Manifest]:
    """Of each part of a State that replicas have in common, by its name.

    Parts are "model" (parameters, buffers), the optimizers, schedulers, scalers, further modules,
    loaders (their cursors), whatever else was prepared or tracked, and the step. Left out is what
    `_OWN` names, what the State says is each worker's own (inner optimizers), and what a worker
    counts for its own bookkeeping (reports, events sent).
    """
    own = {_OWN, *state.meta.get("own", ())}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    meta: dict[str, dict[str, Any]] = {}
    for name, tensor in state.tensors.items():
        tensors.setdefault(_part(name), {})[name] = tensor
    for name, value in state.meta.items():
        if name.startswith("@") or name == "step":
            meta.setdefault(_part(name), {})[name] = value
    return {
        part: State(tensors.get(part, {}), meta.get(part, {})).manifest()
        for part in sorted(tensors.keys() | meta.keys())
        if part not in own
    }


def entries(state: State, parts: Mapping[str, Manifest]) -> dict[str, str]:
    """Digest of each entry of these parts, by the name that a store has it under.

    What several places of a crew have under one name is stored once, so it has to be equal.
    """
    found: dict[str, str] = {}
    for part in parts.values():
        for name, info in part.tensors.items():
            stored = state.stored_name(name)
            if stored is not None:  # a part without elements is stored nowhere
                found[stored] = info.digest[:16]
        for name, value in part.meta.items():
            for entry, of_it in _by_parameter(name, value):
                found[entry] = blake3(json.dumps(of_it, sort_keys=True).encode()).hexdigest(8)
    return found


def _by_parameter(name: str, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """A piece of metadata; of an optimizer one for each parameter: a stage of a model has some."""
    if not is_optimizer(value):
        yield name, value
        return
    lists: dict[str, Any] = dict.fromkeys(BY_PARAMETER)
    options = [{**group, **lists} for group in value["param_groups"]]
    known = {parameter for group in value["param_groups"] for parameter in group["params"]}
    of_none = {key: slot for key, slot in value["state"].items() if key not in known}
    yield name, {**value, "state": of_none, "param_groups": options}
    for number, group in enumerate(value["param_groups"]):
        for parameter in group["params"]:
            yield f"{name}/{parameter}", [number, value["state"].get(parameter)]


def digest(state: State) -> str:
    """Of all parts, as one text: equal for equal replicas. `apart` takes two of them apart."""
    return json.dumps(digests(state), sort_keys=True)


def apart(one: str, other: str) -> tuple[str, ...]:
    """The names of the parts in which two differ that `digest` gave."""
    here, there = json.loads(one), json.loads(other)
    return tuple(n for n in sorted({*here, *there}) if here.get(n) != there.get(n))


def whole(parts: Mapping[str, str]) -> str:
    """The digest of a State from those of its parts."""
    return blake3(json.dumps(sorted(parts.items())).encode()).hexdigest()


def exact_digest(manifest: Manifest) -> str:
    """Of all that an exact run has in common with an undisturbed one; computed from digests alone.

    Left out by name is what tells of the way and not of the place (`_OF_THE_WAY`), and the same of
    loaders and of the guard (`_OF_PARTS`). The random numbers are in it.
    """
    tensors = {
        name: [info.dtype, list(info.shape), info.digest] for name, info in manifest.tensors.items()
    }
    meta = {name: value for name, value in manifest.meta.items() if name not in _OF_THE_WAY}
    for start, of_the_way in _OF_PARTS.items():
        for name in meta:
            if name.startswith(start):
                meta[name] = {k: v for k, v in meta[name].items() if k not in of_the_way}
    return blake3(json.dumps([tensors, meta], sort_keys=True).encode()).hexdigest()


def _part(name: str) -> str:
    """Of which part of a State an entry is, by its name there."""
    if name == "step":
        return name
    return name[1:].split("/")[0] if name.startswith("@") else "model"


def kind_of(other: Stateful) -> str:
    """Under which name an object goes into the State."""
    if isinstance(other, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(other, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    return "scaler" if isinstance(other, torch.amp.GradScaler) else type(other).__name__.lower()


def diverge(worker: int) -> None:
    """Give this worker random numbers of its own: equal dropout masks on all would be a waste."""
    material = torch.get_rng_state().numpy().tobytes() + str(worker).encode()
    seed_generators(int.from_bytes(blake3(material).digest(8)) >> 1)

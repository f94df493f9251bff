"""Start a model from an ancestor's tensors: which ancestor, which tensors, and the copying.

Layers match where type, configuration (as far as `extra_repr` tells it) and all shapes are the
same; store.lineage.shared says which of them, by longest prefix or longest common subsequence. What
does not match keeps its fresh initialisation; nothing is ever copied in part. All stays trainable
unless asked otherwise.

Not here: when a trial inherits (campaign), or how a stored model is found fast (store.nearest).

Source: LP and LCS of Liu et al., CLUSTER'21.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from elastix.config import InheritMode, InheritProvider
from elastix.errors import ConfigError, NotFound, StateError
from elastix.state import Ref, State
from elastix.store import Signature, Store, shared, signature

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inherited:
    """What a model took over from an ancestor.

    Attributes:
        ref: the ancestor.
        layers: how many layers match, `of_layers` of the model's.
        tensors: own tensor name to the ancestor's.
        nbytes: of the model, how many bytes were copied.
        lineage_epochs: passes over the data that these tensors have seen in the ancestor and its
            own ancestors, as its metadata say (`lineage_epochs`); 0.0 if they do not.
        frozen: the copied tensors will not be trained.
        match_s, load_s: seconds of CPU spent on finding the ancestor and its layers, and on
            reading and copying the tensors.
    """

    ref: Ref
    layers: int
    of_layers: int
    tensors: Mapping[str, str]
    nbytes: int
    lineage_epochs: float
    frozen: bool
    match_s: float
    load_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def inherit(
    model: nn.Module,
    store: Store,
    *,
    mode: InheritMode = "lcs",
    provider: InheritProvider = "parent",
    parent: Ref | None = None,
    own: Signature | None = None,
    where: Mapping[str, str | int | float | bool] | None = None,
    freeze: bool = False,
    trial: int | None = None,
    until_s: float | None = None,
) -> Inherited | None:
    """Copy what matches of an ancestor into `model`, in place. Deterministic; not collective.

    Args:
        model: freshly built, before the optimizer is made if `freeze` is set.
        store: where the ancestor is, put with its signature.
        mode: "lp" longest prefix, "lcs" longest common subsequence, "none" nothing at all.
        provider: "parent" takes `parent`; "store" the stored model that shares most layers.
        parent: the suggestion's; with provider "store" it is not needed.
        own: the model's signature, if it has been taken already.
        where: with provider "store", only models whose metadata have these values.
        freeze: train only what was not copied. Frozen tensors stay bit-equal to the ancestor's,
            running statistics included, and so cost no bytes in the store.
        trial: with provider "store", of which this model is. What it left when it ran before, and
            nobody heard of it any more, is no ancestor.
        until_s: with provider "store", only models that were stored by then, in seconds since 1970.

    Returns:
        What was inherited; None if there is no ancestor, it has gone, or nothing matches.

    Raises:
        ConfigError: a mode or provider that does not exist.
        Corrupt: the ancestor cannot be read.
    """
    if mode not in ("lcs", "lp", "none") or provider not in ("parent", "store"):
        raise ConfigError(
            f'mode={mode!r}, provider={provider!r}: mode is "lcs", "lp" or "none", provider '
            '"parent" or "store". Nothing was copied.'
        )
    if mode == "none":
        return None
    began = time.process_time()
    mine = signature(model) if own is None else own
    passed_over: list[str] = []  # with "store": the trial's own of before, and what has just gone
    while True:
        if provider == "store":
            match = store.nearest(mine, mode, where=where, but=passed_over, until_s=until_s)
            parent = match.ref if match else None
        if parent is None:
            return None
        try:
            if provider == "parent" or trial is None or not _is_of(store, parent, trial):
                theirs = store.signature(parent)
                state = store.get(parent, "[!@]*", lazy=True)  # the model alone
                break
        except NotFound:
            if provider == "parent":
                logger.warning("inherit ancestor=%s gone=true: nothing was copied", parent[:12])
                return None
        passed_over.append(parent)
    tensors, layers = match_tensors(mine, theirs, mode) if theirs else ({}, 0)
    tensors = _each_once(model, tensors)
    matched = time.process_time()
    if not tensors:
        return None
    nbytes = copy_tensors(model, state, tensors)
    if freeze:
        freeze_tensors(model, tensors)
    return Inherited(
        ref=parent,
        layers=layers,
        of_layers=len(mine.layers),
        tensors=tensors,
        nbytes=nbytes,
        lineage_epochs=float(state.meta.get("lineage_epochs", 0.0)),
        frozen=freeze,
        match_s=matched - began,
        load_s=time.process_time() - matched,
    )


def _is_of(store: Store, ref: Ref, trial: int) -> bool:
    return store.manifest(ref).meta.get("trial") == trial


def match_tensors(
    mine: Signature, theirs: Signature, mode: Literal["lcs", "lp"]
) -> tuple[dict[str, str], int]:
    """Own tensor names to the ancestor's, and how many layers these are. Pure."""
    pairs = shared(mine, theirs, mode)
    names = {
        _name(own.name, tensor): _name(other.name, tensor)
        for own, other in pairs
        for tensor, _ in own.tensors
    }
    return names, len(pairs)


def _each_once(model: nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """A tensor that has several names, as tied weights do, under its first one alone.

    They may match different tensors of the ancestor, of which the model can have one. What the
    model's state_dict has under another name is left out.
    """
    targets = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, target in targets.items():
        first.setdefault(id(target), name)
    found: dict[str, str] = {}
    hidden = sorted(names.keys() - targets.keys())
    if hidden:  # its state_dict has a hook, as its ancestor's had
        logger.warning(
            "%s has %s under another name in its state_dict, %d in all: these are not inherited",
            *(type(model).__name__, hidden[0], len(hidden)),
        )
    for own, other in names.items():
        if own not in targets:
            continue
        found.setdefault(first[id(targets[own])], other)
    return found


def copy_tensors(model: nn.Module, state: State, names: Mapping[str, str]) -> int:
    """Copy `state`'s tensors into `model` in place, under its own names; bytes of the model.

    Raises:
        StateError: a tensor is missing or its shape differs; nothing was copied then.
    """
    targets = model.state_dict(keep_vars=True)
    sources = {}
    for own, other in names.items():
        source, target = state.tensors.get(other), targets.get(own)
        if source is None or target is None or source.shape != target.shape:
            raise StateError(
                f"tensor {own!r} cannot be inherited from {other!r}: "
                f"{'absent' if target is None else tuple(target.shape)} here, "
                f"{'absent' if source is None else tuple(source.shape)} there. Nothing was copied."
            )
        sources[own] = source
    with torch.no_grad():
        for own, source in sources.items():
            targets[own].copy_(source)
            owner, _, kept = own.rpartition(".")
            if kept == "_extra_state":  # what its get_extra_state gave may be a copy
                model.get_submodule(owner).set_extra_state(targets[own])
    return sum(targets[own].nbytes for own in sources)


def freeze_tensors(model: nn.Module, names: Mapping[str, str]) -> None:
    """Keep these tensors as they are while the rest is trained.

    A layer with statistics of its own (batch norm) normalises by those it has inherited.
    """
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    for prefix, module in model.named_modules():
        own = [_name(prefix, name) for name, _ in module.named_buffers(recurse=False)]
        if any(name in names for name in own):
            module.register_forward_pre_hook(_stays_in_evaluation)


def _stays_in_evaluation(module: nn.Module, inputs: Any) -> None:  # noqa: ANN401 - any inputs
    module.eval()


def _name(prefix: str, tensor: str) -> str:
    return ".".join(part for part in (prefix, tensor) if part)

"""What a trial takes from the lineage store and what it leaves there, on the worker.

Not here: which tensors match (inherit.py), or what the campaign makes of it.
"""

import copy
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from elastix.config import InheritMode, InheritProvider
from elastix.data.rehearsal import ENTRY, Rehearsal
from elastix.errors import Corrupt, NotFound, SearchError, StoreDamaged
from elastix.search.inherit import Inherited, inherit
from elastix.search.trial import Config, Objectives
from elastix.state import Ref, State, Stateful, warm_start
from elastix.state_entries import entries_of, model_of
from elastix.store import Signature, Store, signature
from elastix.train.replica.model_source import LeftModel, TrainedModel

logger = logging.getLogger(__name__)
T = TypeVar("T")


class StoreOpener(Protocol):
    """A store that can be sent to workers: StoreServer is one, StoreDirectory another.

    Two for the same store, by the same way, are equal and have one hash.
    """

    def open(self) -> Store:
        """The store as this process sees it."""
        ...


_opened: dict[StoreOpener, Store] = {}


def opened(opener: StoreOpener) -> Store:
    """The store, opened once in each process and kept: each Store writes files of its own."""
    if opener not in _opened:
        _opened[opener] = opener.open()
    return _opened[opener]


def let_go(opener: StoreOpener) -> None:
    """Close the store in this process; whoever wants it next opens it anew."""
    store = _opened.pop(opener, None)
    if store is not None:
        store.close()


@dataclass(frozen=True)
class StoreDirectory:
    """A store in a directory that every worker reaches, without a server.

    Attributes:
        read_only: nothing is left there; then processes of other hosts may open it beside.
    """

    path: str
    read_only: bool = field(default=False, kw_only=True)

    @property
    def is_here(self) -> bool:
        """Whether this process may open the directory itself."""
        return True

    def open(self) -> Store:
        """See StoreOpener."""
        return Store(self.path, read_only=self.read_only)


@dataclass(frozen=True, kw_only=True)
class InheritTerms:
    """How trials of a campaign inherit and what their models are called. Equal for all of them.

    Attributes:
        optimizer: models are stored with what their optimizer has gathered, for their children.
    """

    store: StoreOpener
    campaign: str
    objectives: Objectives
    mode: InheritMode
    provider: InheritProvider
    optimizer: bool = False


class _FromStore:
    """What model sources have in common: the store that their ancestors are in. See ModelSource."""

    store: StoreOpener

    def open_store(self) -> Store | None:
        """Where a server owns the index, nobody can open it beside."""
        direct = isinstance(self.store, StoreDirectory) and self.store.is_here
        return None if direct else opened(self.store)

    def warm_start(
        self,
        found: Mapping[str, Any],
        modules: Mapping[str, torch.nn.Module],
        others: Mapping[str, Stateful],
    ) -> None:
        """See ModelSource."""
        with suppress(NotFound):  # it was retired just now
            ancestor = opened(self.store).get(found["ref"], "@*", lazy=True)
            warm_start(modules, others, ancestor, found["tensors"])

    def rehearse(self, found: Mapping[str, Any], rehearsal: Rehearsal) -> None:
        """See ModelSource."""
        rehearsal.inherit(opened(self.store).get(found["ref"], f"@{ENTRY}*"))


class TrialModelSource(_FromStore):
    """See train.replica.model_source.ModelSource.

    Args:
        terms: of the campaign.
        number, config: of the trial. A hyperparameter `freeze` of its space, if it is True, keeps
            inherited tensors as they are. It may mean something else: other values do nothing.
        parent: the model that it was suggested from.
        in_place: it goes on where that stands.
        paused: the State that it goes on from.
        inherited: what it inherited before it paused.
        asked_s: when it was proposed, in seconds since 1970; see `for_group`.
    """

    def __init__(
        self,
        terms: InheritTerms,
        number: int,
        config: Config,
        *,
        parent: Ref | None = None,
        in_place: bool = False,
        paused: Ref | None = None,
        inherited: Mapping[str, Any] | None = None,
        asked_s: float | None = None,
    ) -> None:
        self._terms = terms
        self.store = terms.store
        self._number = number
        self._config = config
        self._parent = parent
        self._in_place = in_place
        self._paused = paused
        self._before = inherited
        self._asked_s = asked_s
        self._until_s: float | None = None
        self._found: Inherited | None = None
        self._signature: tuple[torch.nn.Module, Signature] | None = None

    takes_final = True

    def for_group(self) -> "TrialModelSource":
        """The same for several workers, who look for an ancestor one after the other.

        They find the same one, and so do those that come later or run the trial again: of what is
        stored meanwhile nothing counts.
        """
        twin = copy.copy(self)
        twin._until_s = self._asked_s
        return twin

    @property
    def parents(self) -> tuple[Ref, ...]:
        """See ModelSource. A checkpoint of a trial is its own affair."""
        return ()

    @property
    def has_ancestor(self) -> bool:
        """See ModelSource. One that was paused has one if it had one before."""
        if self._terms.mode == "none":
            return False
        if self._paused is not None:
            return self._before is not None
        return self._terms.provider == "store" or self._parent is not None

    def inherit(self, model: torch.nn.Module) -> Mapping[str, Any] | None:
        """See ModelSource. One that was paused inherits from the same ancestor again.

        One whose ancestor is damaged begins afresh, as if it were gone: all others whose best match
        that is would fail with it.
        """
        if not self.has_ancestor:
            return None
        return self._read("inherits nothing", lambda: self._inherit(model))

    def warm_start(
        self,
        found: Mapping[str, Any],
        modules: Mapping[str, torch.nn.Module],
        others: Mapping[str, Stateful],
    ) -> None:
        """See ModelSource. Of an ancestor whose optimizer is damaged the model alone is inherited.

        Likewise with what it has kept of its samples, and with where it stands.
        """
        start = super().warm_start
        self._read("inherits no optimizer", lambda: start(found, modules, others))

    def rehearse(self, found: Mapping[str, Any], rehearsal: Rehearsal) -> None:
        """See ModelSource."""
        rehearse = super().rehearse
        self._read("inherits no samples to rehearse", lambda: rehearse(found, rehearsal))

    def _read(self, without: str, read: Callable[[], T]) -> T | None:
        """What is read of an ancestor. None, and a warning, if that is damaged; None if it is gone.

        Raises:
            StoreDamaged: no fault of one ancestor.
        """
        try:
            return read()
        except NotFound:
            return None
        except StoreDamaged:
            raise
        except Corrupt as error:
            logger.warning("trial=%d %s: %s", self._number, without, error)
            return None

    def _inherit(self, model: torch.nn.Module) -> Mapping[str, Any] | None:
        terms = self._terms
        provider, parent = terms.provider, self._parent
        if self._before is not None:
            provider, parent = "parent", Ref(self._before["ref"])
        self._signature = (model, signature(model))
        self._found = inherit(
            model,
            opened(self.store),
            mode=terms.mode,
            provider=provider,
            parent=parent,
            own=self._signature[1],
            where={"campaign": terms.campaign},
            freeze=self._config.get("freeze") is True,
            trial=self._number,
            until_s=self._until_s,
        )
        if self._found is None:
            return None
        return _told(self._found, model)

    def resume(self) -> State | None:
        """See ModelSource."""
        if self._paused is None:
            return None
        return opened(self.store).get(self._paused)

    def paused_step(self) -> int:
        """See ModelSource."""
        if self._paused is None:
            return 0
        return int(opened(self.store).manifest(self._paused).meta["step"])

    def place(self) -> State | None:
        """See ModelSource."""
        if not self._in_place or self._parent is None or self._paused is not None:
            return None
        parent = self._parent
        return self._read("begins at the beginning", lambda: opened(self.store).get(parent, "@*"))

    def leave(self, leaving: TrainedModel) -> LeftModel | None:
        """See ModelSource. Stores a final model alone or with its optimizer, a paused one whole.

        Without a score it is left out, unless the campaign may have heard what this has not.
        """
        score = self._score(leaving.metrics)
        paused = leaving.reason == "paused"
        if score is None and not paused and leaving.heard_all:
            return None
        ancestor, before = self._ancestor()
        meta = {
            "campaign": self._terms.campaign,
            "trial": self._number,
            "config": dict(self._config),
            "metrics": {k: v for k, v in leaving.metrics.items() if _is_plain(v)},
            "epochs": leaving.epochs,
            "lineage_epochs": leaving.epochs + before,
        }
        state = leaving.state
        if not paused:
            kept = entries_of(state, *(["optimizer"] if self._terms.optimizer else []), ENTRY)
            model = model_of(state)
            state = State({**model.tensors, **kept.tensors}, {**model.meta, **kept.meta})
        state = State(state.tensors, {**state.meta, **meta})
        known = self._signature
        taken = known[1] if known and known[0] is leaving.model else signature(leaving.model)
        self._signature = None  # this outlives the run, and the model need not
        store = opened(self.store)
        before = store.written_bytes
        ref = store.put(
            state,
            parents=[ancestor] if ancestor is not None else [],
            signature=taken,
            score=score,
        )
        return LeftModel(ref, state.nbytes, store.written_bytes - before)

    def _ancestor(self) -> tuple[Ref | None, float]:
        """Whose tensors it began with, and what they had been trained for."""
        if self._found is not None:
            return self._found.ref, self._found.lineage_epochs
        if self._before is not None:
            return Ref(self._before["ref"]), float(self._before["lineage_epochs"])
        return None, 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to one process."""
        return {**self.__dict__, "_found": None, "_signature": None}

    def _score(self, metrics: Mapping[str, Any]) -> float | None:
        try:
            losses = self._terms.objectives.losses(metrics)
        except SearchError:
            return None
        return -losses[0] if all(map(math.isfinite, losses)) else None


@dataclass(frozen=True)
class StoredModelSource(_FromStore):
    """The source of a run that begins with the tensors of one stored model. See ModelSource."""

    store: StoreOpener
    ref: Ref
    has_ancestor = True
    takes_final = False

    @property
    def parents(self) -> tuple[Ref, ...]:
        """The model."""
        return (self.ref,)

    def inherit(self, model: torch.nn.Module) -> Mapping[str, Any] | None:
        """Whatever matches of the model."""
        found = inherit(model, opened(self.store), provider="parent", parent=self.ref)
        return None if found is None else _told(found, model)

    def resume(self) -> State | None:
        """The run keeps its States itself."""
        return None

    def paused_step(self) -> int:
        """The run keeps its States itself."""
        return 0

    def place(self) -> State | None:
        """It begins at the beginning."""
        return None

    def leave(self, leaving: TrainedModel) -> LeftModel | None:
        """The run keeps its States itself."""
        del leaving
        return None


def _told(found: Inherited, model: torch.nn.Module) -> dict[str, Any]:
    """For the journal, with the share of the model's bytes."""
    own = model.state_dict(keep_vars=True).values()  # what a get_extra_state gives is among them
    every = {id(one): one for one in own if isinstance(one, torch.Tensor)}
    total = sum(tensor.nbytes for tensor in every.values()) or 1
    return {**found.to_json(), "share": found.nbytes / total}


def from_scratch(terms: InheritTerms) -> InheritTerms:
    """The same, without inheritance."""
    return replace(terms, mode="none", optimizer=False)


def _is_plain(value: Any) -> bool:  # noqa: ANN401 - any metric
    return not isinstance(value, float) or math.isfinite(value)

"""What a run takes from other models and leaves to them. Train functions see `ctx.inherit` alone.

Not here: which ancestor and which tensors (search.inherit), or where models are kept (store).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastix.data.rehearsal import Rehearsal
from elastix.state import Ref, State, Stateful
from elastix.store import Store


@dataclass(frozen=True)
class TrainedModel:
    """A model at the end of a run, or of a part of it.

    Attributes:
        model: the first module prepared.
        state: views of live tensors; they stay as they are until `leave` returns.
        metrics: the last value of each metric reported.
        epochs: passes over the data that this run made.
        reason: "final", or "paused" if the run is to go on from here.
        heard_all: no report was made before this worker joined, or went on from a checkpoint:
            otherwise `metrics` may lack some.
    """

    model: torch.nn.Module
    state: State
    metrics: Mapping[str, Any]
    epochs: float
    reason: str
    heard_all: bool = True


@dataclass(frozen=True)
class LeftModel:
    """What a run has left in a store.

    Attributes:
        ref: its name there.
        state_bytes, stored_bytes: see StateStored.
    """

    ref: Ref
    state_bytes: int
    stored_bytes: int


class ModelSource(Protocol):
    """Sent to every worker of a run. Its methods are called in the training thread.

    Attributes:
        parents: models that the run begins from: parents of the States that it stores itself.
        has_ancestor: there may be tensors to begin with: whoever prepares without asking for them
            is told so.
        takes_final: the final State goes to `leave`; otherwise it stays with the run, as its
            checkpoints do.
    """

    @property
    def parents(self) -> tuple[Ref, ...]:
        """See above."""
        ...

    @property
    def has_ancestor(self) -> bool:
        """See above."""
        ...

    @property
    def takes_final(self) -> bool:
        """See above."""
        ...

    def open_store(self) -> Store | None:
        """The store, if only its owner can let the run in; None: the run opens it by its path."""
        ...

    def inherit(self, model: torch.nn.Module) -> Mapping[str, Any] | None:
        """Copy an ancestor's tensors into `model`, the same on every worker; JSON says what."""
        ...

    def warm_start(
        self,
        found: Mapping[str, Any],
        modules: Mapping[str, torch.nn.Module],
        others: Mapping[str, Stateful],
    ) -> None:
        """Give optimizers what the ancestor's had gathered on the tensors that were copied.

        Args:
            found: what `inherit` said of the first module.
            modules: prefix to module, as a State has them.
            others: name to optimizers and anything else, likewise.
        """
        ...

    def rehearse(self, found: Mapping[str, Any], rehearsal: Rehearsal) -> None:
        """Let it begin with what the ancestor has kept; `found`: what `inherit` said."""
        ...

    def resume(self) -> State | None:
        """The State that this very run goes on from; None to begin."""
        ...

    def paused_step(self) -> int:
        """The last step in what `resume` gives, of which nothing else is read; 0 to begin."""
        ...

    def place(self) -> State | None:
        """The State in whose place a run begins that has inherited; None: at the beginning."""
        ...

    def leave(self, leaving: TrainedModel) -> LeftModel | None:
        """Store what a run leaves, durably; None if it is not worth keeping."""
        ...

"""Model soups: the average of the weights of models that have a common ancestor.

Models that were trained on from the same weights often lie in one valley of the loss, and then
their average is better than each, at the cost of one. It need not be, so it is looked at: a model
is taken in only if what it gives is no worse by validation than without it.

Source: Wortsman et al., Model soups, ICML'22 (the greedy one).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastix.arguments import require, single
from elastix.errors import ConfigError, StateError
from elastix.lazy_import import later
from elastix.state import OF_MODEL, Ref, State
from elastix.state_entries import model_of
from elastix.store.whole_tensors import wholes

if TYPE_CHECKING:
    import torch

    from elastix.store.store import Store
else:
    torch = later("torch")

logger = logging.getLogger(__name__)

Validate = Callable[[State], float]


@dataclass(frozen=True)
class Soup:
    """What came of averaging.

    Attributes:
        ref: the average, or the best parent if no average is as good as that alone.
        score: of it by validation.
        parents: the models that were averaged, best first; one alone means that nothing was
            stored.
        best_score: of the best parent by validation, never above `score`.
    """

    ref: Ref
    score: float
    parents: tuple[Ref, ...]
    best_score: float

    @property
    def averaged(self) -> bool:
        """There is a new model."""
        return len(self.parents) > 1


def cook(store: Store, refs: Sequence[str], validate: Validate) -> Soup:
    """Average greedily, and store the average. See Store.soup."""
    require(
        isinstance(refs, list | tuple),
        f"refs must be a list of tags or refs, not {refs!r}. Nothing was stored.",
    )
    known = list(dict.fromkeys(store.manifest(ref).ref for ref in refs))
    if len(known) < 2:
        raise ConfigError(
            f"a soup takes two different models or more, not {list(refs)}. Nothing was stored."
        )
    _check(store, known)
    states = {ref: model_of(store.get(ref, OF_MODEL)) for ref in known}
    scores = {ref: _score(validate, state, ref) for ref, state in states.items()}
    best, *others = sorted(known, key=lambda ref: -scores[ref])
    taken, score, soup = [best], scores[best], states[best]
    for ref in others:
        tried = average([states[each] for each in (*taken, ref)])
        reached = _score(validate, tried, ref)
        if reached >= score:
            taken, score, soup = [*taken, ref], reached, tried
    if len(taken) == 1:
        logger.warning(
            "soup models=%s averaged=false: none is as good as %s alone, nothing was stored",
            len(known),
            best[:12],
        )
        return Soup(best, score, (best,), scores[best])
    told = {"score": score, "scores": {ref: scores[ref] for ref in taken}}
    meta = {**soup.meta, "soup": told, **_seen(store, taken)}
    ref = store.put(
        State(soup.tensors, meta), parents=taken, signature=store.signature(best), score=score
    )
    return Soup(ref, score, tuple(taken), scores[best])


def _seen(store: Store, refs: Sequence[Ref]) -> dict[str, float]:
    """Passes over the data that the average has behind it: the most of any of these models."""
    told = [store.manifest(ref).meta.get("lineage_epochs") for ref in refs]
    known = [each for each in told if isinstance(each, int | float) and math.isfinite(each)]
    return {"lineage_epochs": max(known)} if known else {}


def average(states: Sequence[State]) -> State:
    """The mean of each tensor, taken in float64 or complex128.

    Whole numbers, and what modules keep besides tensors, are those of the first.
    """
    mean = {}
    for name, tensor in states[0].tensors.items():
        if not name.startswith("@") and (tensor.is_floating_point() or tensor.is_complex()):
            exact = torch.complex128 if tensor.is_complex() else torch.float64
            total = torch.stack([state.tensors[name].to(exact) for state in states]).mean(dim=0)
            mean[name] = total.to(tensor.dtype)
        else:
            mean[name] = tensor
    return State(mean, states[0].meta)


def _score(validate: Validate, state: State, ref: Ref) -> float:
    score = single(validate(state))
    if isinstance(score, bool) or not isinstance(score, int | float) or math.isnan(score):
        raise ConfigError(
            f"validate gave {score!r} for {ref[:12]}: it must give a number, higher for better. "
            "Nothing was stored."
        )
    return float(score)


def _make_of(store: Store, ref: Ref) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = wholes(store.manifest(ref))
    return {n: (one.dtype, one.shape) for n, one in found.items() if not n.startswith("@")}


def _check(store: Store, refs: Sequence[Ref]) -> None:
    """Refuse what cannot be averaged, or means nothing if it is."""
    first, *others = refs
    ours = _make_of(store, first)
    for ref in others:
        theirs = _make_of(store, ref)
        odd = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        if odd:
            raise StateError(
                f"models {first[:12]} and {ref[:12]} are of different make: {odd[0]!r} is "
                f"{ours.get(odd[0], 'absent')} in the one and {theirs.get(odd[0], 'absent')} in "
                "the other. Nothing was stored."
            )
        if store.common_ancestor(first, ref) is None:
            raise ConfigError(
                f"models {first[:12]} and {ref[:12]} have no common ancestor, and the average of "
                "weights that were trained from different beginnings is no model. Nothing was "
                "stored. `results.ensemble` puts such models together."
            )

"""Several stored models as one: chosen by what they say of validation samples, and calibrated.

Greedy selection with replacement: again and again the model is added that lowers the negative
log-likelihood (NLL) of the averaged probabilities most; how often one was added is its weight.
Then one temperature for the whole. Both are chosen on the validation samples alone.

Invariant: on these samples the NLL is never above that of the best single model.

Source: Caruana et al., Ensemble selection from libraries of models, ICML'04; Guo et al., On
calibration of modern neural networks, ICML'17.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn import functional as F

from elastix.arguments import checked
from elastix.compiled_modules import plain
from elastix.errors import ConfigError, NotFound, StateError
from elastix.search.trial import Config, Trial
from elastix.state import OF_MODEL, Ref, State, capture
from elastix.store import Store

logger = logging.getLogger(__name__)

Build = Callable[[Config], nn.Module]
Batch = tuple[torch.Tensor, torch.Tensor]

_BATCH = 1024
_PICKS = 50
_TEMPERATURES = torch.exp(torch.linspace(-1.6, 1.6, 161, dtype=torch.float64))  # 0.2 to 5, with 1


@checked
class Ensemble(nn.Module):
    """The weighted mean of several classifiers' probabilities, calibrated by one temperature.

    Attributes:
        members: modules that take the same input and give logits, (N, classes).
        weights: of the members, positive, their sum 1.
        temperature: above 1 it makes the probabilities of the mean less certain.
        ref: of the stored ensemble; None if it was not stored.
    """

    weights: torch.Tensor
    temperature: torch.Tensor

    def __init__(
        self, members: Sequence[nn.Module], weights: Sequence[float], temperature: float = 1.0
    ) -> None:
        super().__init__()
        lists = isinstance(members, list | tuple) and isinstance(weights, list | tuple)
        if not (
            lists
            and 0 < len(members) == len(weights)
            and all(isinstance(member, nn.Module) for member in members)
            and all(type(share) in (int, float) and 0 < share < math.inf for share in weights)
        ):
            raise ConfigError(
                f"an ensemble of the members {_kinds(members)} with the weights {weights!r}: a "
                "list of one module at least, and of a positive weight for each. Nothing was made."
            )
        if temperature <= 0:
            raise ConfigError(f"temperature must be > 0, not {temperature!r}. Nothing was made.")
        self.members = nn.ModuleList(members)
        plain(self)
        shares = torch.tensor(weights, dtype=torch.float64)
        self.register_buffer("weights", (shares / shares.sum()).float())
        self.register_buffer("temperature", torch.tensor(float(temperature)))
        self.ref: Ref | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, (N, classes), which every loss that takes logits accepts."""
        each = torch.stack([F.log_softmax(member(x), dim=1) for member in self.members])
        mean = torch.logsumexp(each + self.weights.log()[:, None, None], dim=0)
        return F.log_softmax(mean / self.temperature, dim=1)

    @classmethod
    def load(cls, store: Store, ref: str, build: Build) -> Self:
        """A stored ensemble, in evaluation mode.

        Args:
            store: where it is.
            ref: its tag or ref, such as "nas-1/ensemble".
            build: makes a member of its trial's configuration, as in the search.

        Raises:
            NotFound: no such model. StateError: it is no ensemble, or `build` gives other models.
        """
        state = store.get(ref)
        facts = state.meta.get("ensemble")
        if facts is None:
            raise StateError(f"{ref!r} is no ensemble: it was not stored by results.ensemble.")
        members = facts["members"]
        made = cls([build(deepcopy(m["config"])) for m in members], [m["weight"] for m in members])
        try:
            state.load_into(made)
        except StateError as error:
            raise StateError(f"ensemble {ref!r}: {error}") from error
        made.ref = store.manifest(ref).ref
        return made


def select(truth: torch.Tensor, size: int) -> list[int]:
    """How often each model is taken into the mean. Pure.

    Args:
        truth: logarithm of the probability that each model gives to the true class of each
            sample, (models, samples). Of a very certain model the probability itself may be 0.
        size: how many different models at most.
    """
    counts = [0] * len(truth)
    truth = truth.double()
    total = torch.full((truth.shape[1],), -math.inf, dtype=torch.float64)
    best, best_counts = math.inf, counts
    for pick in range(1, _PICKS + 1):
        losses = math.log(pick) - torch.logaddexp(total, truth).mean(dim=1)
        if sum(count > 0 for count in counts) >= size:
            losses[[count == 0 for count in counts]] = math.inf
        chosen = int(losses.argmin())
        counts = [count + (number == chosen) for number, count in enumerate(counts)]
        total = torch.logaddexp(total, truth[chosen])
        if float(losses[chosen]) < best:
            best, best_counts = float(losses[chosen]), counts
    return best_counts


def calibrate(log_probabilities: torch.Tensor, targets: torch.Tensor) -> float:
    """The temperature with the lowest NLL. Pure.

    Args:
        log_probabilities: (samples, classes).
        targets: the true classes, (samples,).
    """
    losses = [
        float(F.nll_loss(F.log_softmax(log_probabilities.double() / t, dim=1), targets))
        for t in _TEMPERATURES
    ]
    return float(_TEMPERATURES[losses.index(min(losses))])


def assemble(
    trials: Sequence[Trial],
    store: Store,
    *,
    size: int,
    build: Build,
    validation: Batch | Iterable[Batch],
    campaign: str,
) -> Ensemble:
    """Choose among the trials' models, calibrate, store. See Results.ensemble."""
    if type(size) is not int or size < 1:
        raise ConfigError(f"size={size!r}: a whole number >= 1. Nothing was stored.")
    batches = _batches(validation)
    targets = torch.cat([y for _, y in batches])
    models: list[tuple[Trial, nn.Module, torch.Tensor]] = []
    unusable = 0
    for trial in trials:
        model = _load(trial, store, build)
        if model is not None:
            said = _ask(model, batches, f"the model of trial {trial.number}")
            # A class that a model rules out has -inf; what it has for the true ones must be finite.
            if said.isnan().any() or not torch.isfinite(said.gather(1, targets[:, None])).all():
                logger.warning(
                    "the model of trial %s gives the true class of some sample a probability of 0, "
                    "or NaN. It is left out of the ensemble.",
                    trial.number,
                )
                unusable += 1
                continue
            models.append((trial, model, said))
    if not models:
        why = (
            f"{unusable} gave the true class of some sample a probability of 0, or NaN: drop the "
            "classes that they rule out from validation, and look for NaN in what they answer."
            if unusable
            else "A model is left by a train function that calls ctx.prepare."
        )
        raise NotFound(
            f"no trial of {campaign!r} has left a model that can be used, so there is nothing to "
            f"put together. Nothing was stored. {why}"
        )
    said = torch.stack([log_probabilities for _, _, log_probabilities in models])
    counts = select(said[:, torch.arange(len(targets)), targets], size)
    chosen = [place for place, count in enumerate(counts) if count]
    weights = [counts[place] for place in chosen]
    made = Ensemble([models[place][1] for place in chosen], weights).eval()
    weighted = said[chosen].double() + made.weights.double().log()[:, None, None]
    temperature = calibrate(torch.logsumexp(weighted, dim=0), targets)
    made.temperature.fill_(temperature)
    members = [
        {"trial": t.number, "ref": t.ref, "weight": float(w), "config": dict(t.config)}
        for (t, _, _), w in zip([models[p] for p in chosen], made.weights, strict=True)
    ]
    single = min(said, key=lambda each: float(F.nll_loss(each, targets)))
    facts: dict[str, Any] = {
        "members": members,
        "temperature": temperature,
        "validation": {
            "samples": len(targets),
            **_measured(_ask(made, batches, "the ensemble"), targets),
            "best_single": _measured(single, targets),
        },
    }
    state = capture({"": made}, {}, {"campaign": campaign, "ensemble": facts})
    parents = [str(member["ref"]) for member in members]
    made.ref = store.put(state, parents=parents, score=-facts["validation"]["nll"])
    return made


def _measured(said: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    wrong = (said.argmax(dim=1) != targets).double().mean()
    return {"nll": float(F.nll_loss(said.double(), targets)), "error": float(wrong)}


def _load(trial: Trial, store: Store, build: Build) -> nn.Module | None:
    """The trial's model; None if there is none any more."""
    if trial.ref is None:
        return None
    try:
        state: State = store.get(trial.ref, OF_MODEL)
    except NotFound:
        logger.warning(
            "the model %s of trial %s is no longer in the store. It is left out of the ensemble.",
            trial.ref[:12],
            trial.number,
        )
        return None
    try:
        return state.load_into(build(deepcopy(trial.config)))
    except StateError as error:
        raise StateError(f"trial {trial.number}: {error} Nothing was stored.") from error


def _batches(validation: Batch | Iterable[Batch]) -> list[Batch]:
    """Batches of a pair of tensors, or of whatever gives batches; each read once."""
    whole = isinstance(validation, tuple | list) and len(validation) == 2
    if whole and all(isinstance(part, torch.Tensor) for part in cast(Sequence[Any], validation)):
        x, y = cast(Batch, validation)
        batches = list(zip(x.split(_BATCH), y.split(_BATCH), strict=False))
        fits = len(x) == len(y) > 0
    else:
        batches = list(cast(Iterable[Batch], validation)) if _goes_through(validation) else []
        fits = bool(batches) and all(map(_is_batch, batches))
    if not fits or any(y.ndim != 1 or y.is_floating_point() for _, y in batches):
        raise ConfigError(
            "validation must be samples and their classes, whole numbers of shape (N,), as two "
            "tensors of equal length or as batches of such pairs, none of them empty. This is "
            f"not: {validation!r:.100}. Nothing was stored. torch.as_tensor makes tensors "
            "of arrays, and DataLoader(dataset, batch_size=256) makes batches of a dataset."
        )
    return [(x, y.long()) for x, y in batches]


def _goes_through(validation: object) -> bool:
    """Whether there is something to go through; a dataset has places only."""
    return isinstance(validation, Iterable) and not isinstance(validation, str | bytes | Mapping)


def _is_batch(batch: Any) -> bool:  # noqa: ANN401 - whatever came
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not pair or not all(isinstance(part, torch.Tensor) and part.ndim for part in batch):
        return False
    return len(batch[0]) == len(batch[1]) > 0


@torch.no_grad()
def _ask(model: nn.Module, batches: Sequence[Batch], what: str) -> torch.Tensor:
    """Log-probabilities of all samples, (samples, classes)."""
    said = []
    for x, y in batches:
        logits = model(x)
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        if not isinstance(shape, tuple) or len(shape) != 2 or shape[0] != len(y):
            raise ConfigError(
                f"{what} answers {len(y)} samples with {shape}; only logits of shape (N, classes) "
                "can be put together. Nothing was stored."
            )
        if int(y.max()) >= shape[1] or int(y.min()) < 0:
            raise ConfigError(
                f"{what} knows {shape[1]} classes, and validation has classes from {int(y.min())} "
                f"to {int(y.max())}. Nothing was stored."
            )
        said.append(F.log_softmax(logits.float(), dim=1))
    return torch.cat(said)


def _kinds(members: object) -> object:
    """The classes of members, whose texts are long."""
    return [type(each).__name__ for each in members] if isinstance(members, list) else members

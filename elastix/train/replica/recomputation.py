"""Slices that are computed more than once, so that what a slice gives is seen to follow from it.

Under exact=True whoever computes a slice of a State gets the same bytes. Here that is looked at, by
having some slices computed again within the loop of the train function, for nothing but a digest:

- in a worker's first step its first slice, twice more: code that goes by anything else than State
  and slice (a generator of its own, a counter) is found there;
- in its first step also a slice of another worker: so code is found that gives a worker the same
  each time and others something else, as a counter does that begins at 0 in whoever joins;
- every so many steps one slice, by another worker than its own: a processor that miscalculates, and
  what only shows between workers.

If two differ, the step is void. It is done again, and *all* compute the slice in question, twice.
From what they tell each other then, and what they had before, follows whose fault it is (`decide`).
So it is, too, if the guard finds a gradient too large: it may be that of a bad batch, which is left
out in the end, or somebody has miscalculated.

Not here: how gradients are digested (comm.gradients.slice_digests), what becomes of who is at fault
(step_commits).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.utils._pytree import tree_leaves

from elastix.comm.gradients.slice_digests import Sum, number, tensor_digest
from elastix.comm.protocol.calls import name
from elastix.comm.slice_tree import Node
from elastix.data.drawn_batch import SlicedDraw
from elastix.data.random_numbers import generators_digest, seed_at
from elastix.errors import ReplicasDiffer, TrainError
from elastix.train.replica.guard import ABSENT, Alarm, ordered
from elastix.train.replica.guard import number as from_bits

_ROWS = 4
"""So many results of a slice a worker tells of: two of before, and two of when it was disputed."""


@dataclass(frozen=True)
class Computed:
    """Digests of one computation of a slice: 62 bits each.

    Attributes:
        gradients, buffers: what it gave.
        batch: what was read for it.
        drawn: the random numbers that come next; so, how many were drawn.
    """

    gradients: int
    buffers: int
    batch: int
    drawn: int

    @property
    def result(self) -> tuple[int, int]:
        """What has to be the same whoever computes it."""
        return self.gradients, self.buffers


@dataclass(frozen=True)
class SliceFault:
    """Whose fault it is that a slice gave different results.

    Attributes:
        apart: workers that miscalculated; all, if most do not agree; none, if nobody who is left.
            Or if it is the code: newcomers with whom it gives something else than with others.
        code: what the train function does is the cause, since several compute another result the
            second time, or somebody who is alone; or a newcomer has another one each time.
        parts: what differs, as in Computed.
    """

    apart: tuple[int, ...]
    code: bool
    parts: tuple[str, ...]


def chosen(seed: int, step: int, draw: SlicedDraw) -> tuple[int, int]:
    """The slice of a step that is looked at, and who computes it beside its owner.

    Whoever is alone does so itself.
    """
    present = [n for n, samples in enumerate(draw.samples) if samples]
    chance = seed_at(seed, "again", step)
    slice_ = present[chance % len(present)]
    owner = draw.assignment.planned[slice_]
    others = [member for member in draw.members if member != owner] or [owner]
    return slice_, others[chance // len(present) % len(others)]


def look_at_newcomers(
    seed: int, step: int, draw: SlicedDraw, fresh: Collection[int]
) -> tuple[int, frozenset[int]]:
    """The slice that newcomers compute in their first step, and who does beside its owner.

    It is one of somebody who has been here before, if there is anybody: what that one gives is
    what the run has gone by so far.

    Args:
        seed: of the run.
        step: how many are committed.
        draw: the batch.
        fresh: members in whose first step with this loader it is.
    """
    planned, chance = draw.assignment.planned, seed_at(seed, "newcomers", step)
    present = [n for n, samples in enumerate(draw.samples) if samples]
    known = [n for n in present if planned[n] not in fresh] or present
    slice_ = known[chance % len(known)]
    witnesses = {member for member in fresh if member != planned[slice_]}
    others = [member for member in draw.members if member not in fresh]
    if planned[slice_] in fresh and others:  # these have no slice
        witnesses.add(others[chance // len(known) % len(others)])
    return slice_, frozenset(witnesses)


def decide(
    before: Mapping[int, Sequence[Computed]],
    again: Mapping[int, Sequence[Computed]],
    changed: Collection[int] = (),
    fresh: Collection[int] = (),
) -> SliceFault:
    """Whose fault it is.

    Args:
        before: by worker, what the slice gave when it was found to differ.
        again: by worker, what it gave when all computed it again, twice.
        changed: workers that have added up something else than before, from the same slices.
        fresh: workers in whose first step it is.
    """
    given = {w: {r.result for r in results} for w, results in again.items()}
    others = _otherwise(given, fresh)
    if others:
        return SliceFault(others, True, _parts([r for found in again.values() for r in found]))
    unstable = [w for w, results in given.items() if len(results) > 1]
    if len(unstable) > 1 or (unstable and len(again) == 1):
        worker = unstable[0]
        return SliceFault((), True, _parts(again[worker]))
    counted = Counter(r for w, results in given.items() if w not in unstable for r in results)
    result, most = counted.most_common(1)[0]
    everything = [r for results in (*before.values(), *again.values()) for r in results]
    parts = _parts(everything)
    if not unstable and 2 * most <= len(again):
        return SliceFault(tuple(sorted(again)), False, parts)
    apart = {w for w in again if any(r.result != result for r in (*before.get(w, ()), *again[w]))}
    apart |= again.keys() & set(changed)
    return SliceFault(tuple(sorted(apart)), False, parts or ("gradients",) * bool(apart))


def _otherwise(
    given: Mapping[int, Collection[tuple[int, int]]], fresh: Collection[int]
) -> tuple[int, ...]:
    """Newcomers that got the same each time, and something else than whoever was there before.

    A processor that has miscalculated once gets what the others get when it computes again.
    """
    if any(len(results) > 1 for results in given.values()):
        return ()
    newcomers = given.keys() & set(fresh)
    known = {result for w in given.keys() - newcomers for result in given[w]}
    if len(known) > 1:
        return ()
    apart = sorted(w for w in newcomers if known and not known & set(given[w]))
    if not known and len({result for w in newcomers for result in given[w]}) > 1:
        apart = sorted(newcomers)
    return tuple(apart)


def _parts(results: Sequence[Computed]) -> tuple[str, ...]:
    names = ("gradients", "buffers", "batch", "drawn")
    columns = zip(*map(astuple, results), strict=True)
    return tuple(n for n, column in zip(names, columns, strict=True) if len(set(column)) > 1)


class Recomputation:
    """One worker's part in it.

    Args:
        seed: of the run.
        every: after so many steps one slice is computed by two workers; None: nothing is ever
            computed again.
        step: how many are committed.

    Attributes:
        disputed: slices that gave different results, or a suspect one, when the step in hand was
            tried before.
        alarm: of the guard, if it was that which made them suspect.
    """

    def __init__(self, seed: int, every: int | None, step: Callable[[], int]) -> None:
        self.disputed: tuple[int, ...] = ()
        self.alarm: Alarm | None = None
        self._seed = seed
        self._step = step
        self._every = every
        self._looked = False  # at a slice of its own, in its first step
        self._chosen: int | None = None  # slice that is looked at in the step in hand
        self._fresh: tuple[int, ...] = ()  # in whose first step that is
        self._found: dict[int, list[Computed]] = {}
        self._before: list[Computed] = []  # of the disputed ones
        self._sums: Mapping[Node, Sum] = {}  # that a suspect gradient was made of, on this worker

    @property
    def wanted(self) -> bool:
        """Whether anything is ever computed again."""
        return self._every is not None

    def begin(
        self, draw: SlicedDraw, me: int, own: Sequence[int], fresh: Sequence[int] = ()
    ) -> list[int]:
        """A step begins: slices to compute beside one's own, before them.

        Args:
            draw: its batch.
            me: this worker.
            own: slices that fall to it; the first of them may be looked at.
            fresh: members in whose first step with this loader it is; all say the same.
        """
        self._found, self._chosen, self._fresh = {}, None, tuple(fresh)
        if not self._every:
            return []
        if self.disputed:
            return [slice_ for slice_ in self.disputed for _ in range(2)]
        more = []
        if fresh and len(draw.members) > 1:
            self._chosen, witnesses = look_at_newcomers(self._seed, self._step(), draw, fresh)
            more = [self._chosen] if me in witnesses else []
        elif (self._step() + 1) % self._every == 0:
            self._chosen, witness = chosen(self._seed, self._step(), draw)
            more = [self._chosen] if witness == me else []
        if own and not self._looked:
            self._looked = True
            more += [own[0]] * 2
        return more

    def looks_at(self, slice_: int, more: Sequence[int]) -> bool:
        """Whether the result of a slice is wanted, if `more` are computed once more."""
        return slice_ == self._chosen or slice_ in more

    def computed(self, slice_: int, result: tuple[int, int], batch: int) -> None:
        """A slice that is looked at was computed; the generators are as it has left them."""
        found = Computed(*result, batch=batch, drawn=generators_digest())
        self._found.setdefault(slice_, []).append(found)

    def vote(self) -> dict[str, int]:
        """What goes into the vote on the step in hand, as fields of Vote."""
        if self.disputed:
            return {}
        doubted = [n for n, found in self._found.items() if len({r.result for r in found}) > 1]
        told = {"doubted": max(doubted) + 1} if doubted else {}
        if self._chosen in self._found:
            told["seen"] = number(blake3(repr(self._found[self._chosen][0].result).encode()))
        return told

    def dispute(self, doubted: int) -> None:
        """The step in hand is void, since a slice gave different results.

        Args:
            doubted: which, and 1; 0 for the one that all looked at.
        """
        slice_ = doubted - 1 if doubted else self._chosen
        if slice_ is not None:
            self.disputed, self._before = (slice_,), self._found.get(slice_, [])

    # ------------------------------------------------------------- a gradient that is too large

    def largest(self, sums: Mapping[Node, Sum]) -> list[int]:
        """What this worker tells when the guard finds the gradient suspect.

        Args:
            sums: that it has added to it.

        Returns:
            The norm of the largest (guard.ordered), and which slices are in it: first, and beyond.
        """
        self._sums = sums
        if not sums:
            return [ABSENT, 0, 0]
        norm, node = max((ordered(found.norm), node) for node, found in sums.items())
        return [norm, node.slices.start, node.slices.stop]

    def suspect(self, told: Mapping[int, Sequence[int]], alarm: Alarm, draw: SlicedDraw) -> None:
        """The slices in the largest sum of all are to be computed again by all.

        Args:
            told: what all have told of theirs.
            alarm: of the guard.
            draw: the batch.
        """
        _, first, stop = max(map(tuple, told.values()))
        self.disputed = tuple(n for n in range(first, stop) if draw.samples[n])
        self.alarm, self._before = alarm, []

    # --------------------------------------------------------------------- whose fault it was

    def numbers(self, sums: Mapping[Node, Sum]) -> list[int]:
        """What this worker has to tell of the disputed slices: see `_ROWS`.

        And whether it has added up something else than when the gradient was suspect.

        Args:
            sums: that it has added up now.
        """
        found = [self._found.get(slice_, [])[:2] for slice_ in self.disputed]
        again = [_together(results) for results in zip(*found, strict=True)] if all(found) else []
        rows = [*_padded(self._before), *_padded(again)]
        both = self._sums.keys() & sums.keys()
        changed = any(self._sums[node].digest != sums[node].digest for node in both)
        return [*(number_ for row in rows for number_ in row), int(changed)]

    def settle(self, told: Mapping[int, Sequence[int]]) -> SliceFault | None:
        """What follows from what all have told; None if nobody computed it again."""
        fresh = self._fresh if self.alarm is None else ()
        self.disputed, self.alarm, self._before, self._sums = (), None, [], {}
        rows = {worker: list(_rows(numbers)) for worker, numbers in told.items()}
        before = {w: [r for r in found[:2] if r is not None] for w, found in rows.items()}
        again = {w: [r for r in found[2:] if r is not None] for w, found in rows.items()}
        again = {w: found for w, found in again.items() if found}
        changed = frozenset(worker for worker, (*_, other) in told.items() if other)
        return decide(before, again, changed, fresh) if again else None

    def state_dict(self) -> dict[str, Any]:
        """For who joins before the dispute is settled; nothing without one."""
        if not self.disputed:
            return {}
        alarm = self.alarm
        told = alarm and [alarm.what, ordered(alarm.value), ordered(alarm.usual)]
        return {"disputed": {"slices": list(self.disputed), "alarm": told}}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """As a State's metadata have it."""
        there = meta.get("disputed", {"slices": (), "alarm": None})
        self.disputed, self._before, self._sums = tuple(there["slices"]), [], {}
        self.alarm = None
        if there["alarm"] is not None:
            what, *bits = there["alarm"]
            value, usual = (math.nan if (n := from_bits(b)) is None else n for b in bits)
            self.alarm = Alarm(what, value, usual)


def _together(results: Sequence[Computed]) -> Computed:
    """Of several slices, one for all."""
    if len(results) == 1:
        return results[0]
    columns = zip(*map(astuple, results), strict=True)
    return Computed(*(number(blake3(repr(column).encode())) for column in columns))


def _padded(found: Sequence[Computed]) -> list[tuple[int, ...]]:
    rows = [astuple(found[0]), astuple(found[-1])] if found else []
    return rows + [(0,) * 4] * (_ROWS // 2 - len(rows))


def _rows(numbers: Sequence[int]) -> Iterator[Computed | None]:
    for place in range(_ROWS):  # beyond them is something else
        row = numbers[4 * place : 4 * place + 4]
        yield Computed(*row) if any(row) else None


def batch_digest(batch: object) -> int:
    """Of the tensors, arrays, numbers and texts in a batch; other objects count by their type."""
    found = blake3()
    for leaf in tree_leaves(batch):
        found.update(type(leaf).__name__.encode())
        if isinstance(leaf, torch.Tensor):
            found.update(tensor_digest(leaf))
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            found.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        elif isinstance(leaf, int | float | complex | str | bytes):
            found.update(repr(leaf).encode())
    return number(found)


_CAUSES = {
    "batch": "its samples were read differently (dataset, augment or collate_fn)",
    "drawn": "as many random numbers were not drawn from the generators of torch, NumPy or Python",
    "gradients": "it gave other gradients",
    "buffers": "it left other buffers",
}


def unrepeatable(step: int, slices: Sequence[int], fault: SliceFault) -> TrainError:
    """The error that ends a run whose train function gives something else the second time.

    Args:
        step: that does not count for it.
        slices: of it.
        fault: that it is so.
    """
    what = "; ".join(_CAUSES[part] for part in _CAUSES if part in fault.parts)
    which = ", ".join(map(str, slices))
    if fault.apart:
        return _unrepeatable_elsewhere(step, which, fault, what)
    return TrainError(
        f"RunConfig(exact=True) and slice {which} of step {step}, which was computed more than "
        f"once by the same worker and differed: {what}. The step does not count, and the run was "
        "stopped: its bytes would depend on who computes what. A slice may depend on the State and "
        "on itself alone. Look for a torch.Generator or numpy.random.default_rng of your own, for "
        "counters in the model, the dataset or the loop (enumerate(step)), for what a slice hands "
        "on to the next one (the hidden state of a recurrent network), and for gradients that are "
        "changed within the loop over slices through .data. Use the global generators, "
        "augment(sample, rng), ctx.step and buffers; or leave exact out. If there is nothing of "
        "the kind, the processor miscalculates."
    )


def _unrepeatable_elsewhere(step: int, which: str, fault: SliceFault, what: str) -> TrainError:
    who = name(fault.apart)
    return TrainError(
        f"RunConfig(exact=True) and slice {which} of step {step}, which is the first step of "
        f"{who}: each time that it was computed there it gave something else than with other "
        f"workers: {what}. The step does not count, and the run was stopped: its bytes would "
        "depend on who computes what. Whoever joins is given the State, and runs the train "
        "function from its beginning. Look for a counter in it that begins at 0 there "
        "(number += 1, enumerate(epoch)), for samples that were chosen by what the model was "
        "then, and for ctx.rank, ctx.worker and ctx.world_size. Use ctx.step, epoch.number and "
        "ctx.track; or leave exact out. If there is nothing of the kind, the processor of "
        f"{who} miscalculates."
    )


def miscalculated(step: int, fault: SliceFault) -> ReplicasDiffer:
    """The error that ends a run whose workers compute the same slice differently, again and again.

    Args:
        step: that does not count for it.
        fault: who.
    """
    return ReplicasDiffer(
        f"in step {step} {name(fault.apart)} computed a slice differently than the others, or "
        f"than before; what differs: {', '.join(fault.parts)}. The step does not count, and the "
        "run was stopped: it has happened again and again, or most do not agree, and there is no "
        "State to go back to. Calling fit() again goes on from the last stored State. Look for "
        "code that treats workers differently or goes by what a worker did before (a generator of "
        "its own, a counter); and, if there is none, for faulty processors or memory."
    )

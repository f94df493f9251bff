"""Whether workers that should hold the same State do: what their digests say. Pure.

At boundaries that all agree on, each worker takes a digest of every part of its State
(state_digests). Here they are put side by side. Not here: when that is done (schedule), and who
brings them together (coordinator).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from elastix.comm.protocol.calls import name
from elastix.errors import ReplicasDiffer
from elastix.events import ReplicasCompared, ReplicasDiverged
from elastix.train.checkpoint import state_digests
from elastix.train.checkpoint.assembly import CheckpointId

_REMEMBERED = 64
_NAMED = 5  # entries, in a message
_LOOK_FOR = (
    "Look for code that treats workers differently (a change of weights, buffers or optimizer on "
    "one rank alone; a forward pass in training mode between backward and the next batch, which "
    "moves batch norm's statistics by one worker's samples: use model.eval(); a tracked object fed "
    "with one worker's own values: feed it with what all have, or do not track it; if one of them "
    "joined during the run, a variable of the train function that began anew there, such as a "
    "learning rate or a counter: use ctx.step and epoch.number, or ctx.track); and, if none of "
    "this is so, for "
)

_ENDED = (
    "The step after it does not count, and the run was stopped: it has happened again and again, "
    "or there is no State to go back to that all were seen to hold, or nobody who could "
    "(FailureConfig has replace=False). Calling fit() again goes on from the last stored State, if "
    "there is one."
)

_NOBODY: Mapping[int, int] = MappingProxyType({})

Parts = Mapping[str, str]
"""Digest of each part of a State, by its name."""


class Comparisons:
    """Those of one run, under the marks of the boundaries at which digests were taken.

    Attributes:
        equal_step: after which step all that were compared were equal, the last time.
    """

    def __init__(self) -> None:
        self.equal_step: int | None = None
        self._held: dict[CheckpointId, dict[tuple[int, int], dict[int, Parts]]] = {}  # by worker
        self._told: dict[CheckpointId, ReplicasCompared] = {}
        self._entries: dict[tuple[CheckpointId, int], tuple[int, dict[str, str]]] = {}  # by worker
        self._parted: dict[CheckpointId, ReplicasDiffer] = {}

    def hold(
        self, mark: CheckpointId, worker: int, parts: Parts, place: int = 0, processor: int = 0
    ) -> None:
        """A worker has told what it holds; nothing, if it was alone.

        Processes of crews hold the same as those at the same place of other workers; and workers
        hold the same as those whose processors are of the same kind.
        """
        if parts:
            self._held.setdefault(mark, {}).setdefault((place, processor), {})[worker] = parts
            while len(self._held) > _REMEMBERED:
                oldest = next(iter(self._held))
                self._held.pop(oldest)
                self._told.pop(oldest, None)

    def hold_entries(
        self, mark: CheckpointId, worker: int, entries: Mapping[str, str], places: int
    ) -> None:
        """One of so many places of a worker has told what it holds, by stored name."""
        if not entries:
            return
        heard, known = self._entries.pop((mark, worker), (0, {}))
        apart = sorted(name for name in entries if known.get(name, entries[name]) != entries[name])
        if apart:
            self._parted.setdefault(mark, _places_differ(mark.step, worker, apart))
        if heard + 1 < places:
            self._entries[mark, worker] = heard + 1, {**known, **entries}
            while len(self._entries) > _REMEMBERED:
                self._entries.pop(next(iter(self._entries)))

    def parted(self, mark: CheckpointId) -> ReplicasDiffer | None:
        """The error that ends a run in which places of one worker differ; None if none were seen.

        Only what several of them have under one stored name can be compared.
        """
        return self._parted.get(mark)

    def told_by(self, mark: CheckpointId) -> set[int]:
        """Workers that have told what they hold."""
        return {worker for rail in self._held.get(mark, {}).values() for worker in rail}

    def forget(self) -> None:
        """Everybody who held a State is lost: others may come to the same steps in another way."""
        self._held.clear()
        self._told.clear()
        self._entries.clear()
        self._parted.clear()

    def settle(self, mark: CheckpointId, occasion: str) -> ReplicasCompared | None:
        """What those come to who have told so far; None if it is no news."""
        found = self._found(mark, occasion)
        before = self._told.get(mark)
        if found is None:
            return None
        if before is not None and (before.workers, before.apart) == (found.workers, found.apart):
            return None
        self._told[mark] = found
        if found.equal:
            self.equal_step = found.step
        return found

    def _found(self, mark: CheckpointId, occasion: str) -> ReplicasCompared | None:
        rails = self._held.get(mark, {})
        return _together(
            {str(place): compare(mark.step, occasion, rails[place]) for place in sorted(rails)}
        )


def compare(
    step: int, occasion: str, held: Mapping[int, Parts], donors: Mapping[int, int] = _NOBODY
) -> ReplicasCompared | None:
    """What the States of several workers after one step come to; None for fewer than two.

    Args:
        step: committed steps in them.
        occasion: see ReplicasCompared.
        held: by worker.
        donors: see compare_kinds.
    """
    if len(held) < 2:
        return None
    wholes = {worker: state_digests.whole(parts) for worker, parts in held.items()}
    alike: dict[str, list[int]] = {}
    for worker, whole in wholes.items():
        alike.setdefault(whole, []).append(worker)
    votes = {whole: _votes(workers, held, donors) for whole, workers in alike.items()}
    digest = max(votes, key=lambda whole: votes[whole])
    if 2 * votes[digest] <= sum(votes.values()):
        digest = ""  # nobody can say which of them is right
    names = sorted({name for parts in held.values() for name in parts})
    return ReplicasCompared(
        step=step,
        occasion=occasion,
        workers=tuple(sorted(held)),
        digest=digest,
        apart=tuple(worker for worker in sorted(held) if wholes[worker] != digest),
        parts=tuple(name for name in names if len({p.get(name) for p in held.values()}) > 1),
    )


def _votes(alike: Sequence[int], held: Collection[int], donors: Mapping[int, int]) -> int:
    """For how many workers count some that hold the same.

    Who was given what another one held says no more than that one: a bit of it may have flipped
    before. But if the donor holds something else now, that shows that it has changed since.
    """
    known = ((worker, donors.get(worker, worker)) for worker in alike)
    return len({w if donor in held and donor not in alike else donor for w, donor in known})


def compare_kinds(
    step: int,
    occasion: str,
    held: Mapping[int, tuple[int, Parts]],
    donors: Mapping[int, int] = _NOBODY,
) -> ReplicasCompared | None:
    """What several workers hold, each compared with those whose processors are of its kind.

    Args:
        step: committed steps in it.
        occasion: see ReplicasCompared.
        held: by worker, the kind of its processor and what it holds.
        donors: by worker, whose State it was given, if not all of it was compared since.
    """
    kinds: dict[int, dict[int, Parts]] = {}
    for worker, (kind, parts) in held.items():
        kinds.setdefault(kind, {})[worker] = parts
    return _together({str(kind): compare(step, occasion, of, donors) for kind, of in kinds.items()})


def _together(told: Mapping[str, ReplicasCompared | None]) -> ReplicasCompared | None:
    """What several comparisons come to: all that found a difference, or all if none did."""
    equal = {of: event for of, event in told.items() if event is not None and event.equal}
    apart = {of: event for of, event in told.items() if event is not None and not event.equal}
    found = apart or equal
    events = list(found.values())
    if len(events) < 2:
        return events[0] if events else None
    digest = "" if apart else state_digests.whole({of: e.digest for of, e in found.items()})
    return replace(
        events[0],
        workers=tuple(sorted({worker for event in events for worker in event.workers})),
        digest=digest,
        apart=tuple(sorted({worker for event in events for worker in event.apart})),
        parts=tuple(sorted({part for event in events for part in event.parts})),
    )


def fault(found: ReplicasCompared, equal_step: int | None) -> ReplicasDiffer:
    """The error that ends a run whose replicas are not equal.

    Args:
        found: that they are not.
        equal_step: after which step they were equal the last time; None if never compared before.
    """
    before = "They had not been compared before in this run."
    if equal_step is not None:
        before = f"They were equal when last compared, after step {equal_step}."
    return _differ(
        found,
        f"{before} Nothing was stored of step {found.step}, and the run was stopped. Calling "
        "fit() again goes on from the last stored State.",
    )


def fault_before(found: ReplicasDiverged) -> ReplicasDiffer:
    """The same, where whoever led the run was killed as it had said that, and no more."""
    return _differ(
        found,
        "The run was stopped by another controller: the one before had found that, and was killed "
        "before it could. Calling fit() again goes on from the last stored State.",
    )


def _places_differ(step: int, worker: int, names: Sequence[str]) -> ReplicasDiffer:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ReplicasDiffer(
        f"after step {step} the processes of worker {worker} hold different values of what each "
        f"of them has whole: {', '.join(names[:_NAMED])}{more}. Only one of them would have been "
        f"stored. Nothing was stored of step {step}, and the run was stopped. Look for a buffer "
        "or a tracked object that is fed with one process's samples: average it over "
        "ctx.mesh['shard'], or keep it out of the State."
    )


def diverged(found: ReplicasCompared) -> ReplicasDiffer:
    """The error that ends a run whose replicas were seen to part in a step, if nothing else can.

    Args:
        found: that they are not equal, before the step after `found.step`.
    """
    return _differ(found, _ENDED)


def parted_from_lost(step: int, workers: Sequence[int]) -> ReplicasDiffer:
    """The same, where those who hold another State are lost, or nobody is left to compare with.

    Args:
        step: the last that counts.
        workers: that are left.
    """
    return ReplicasDiffer(
        f"after step {step} workers held different States, and some were lost before all had told "
        f"what they hold. Left {'is' if len(workers) == 1 else 'are'} {name(workers)}, and what "
        f"that has computed may be wrong. {_ENDED}"
    )


def _differ(found: ReplicasCompared | ReplicasDiverged, what_was_done: str) -> ReplicasDiffer:
    rest = [worker for worker in found.workers if worker not in found.apart]
    one = len(found.apart) == 1
    if rest:
        hold = "holds" if one else "hold"
        who = f"{name(found.apart)} {hold} another State than {name(rest)}"
    else:
        who = f"{name(found.workers)} hold different States, and no more than half hold the same"
    return ReplicasDiffer(
        f"after step {found.step} {who}; what differs: {', '.join(found.parts)}. {what_was_done} "
        f"{_LOOK_FOR}faulty memory on the {'node' if one else 'nodes'} of {name(found.apart)}."
    )

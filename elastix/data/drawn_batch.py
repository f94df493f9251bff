"""A global batch that is drawn and not committed yet: whose samples are which. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from elastix.data.backward_window import Ratio, lowest
from elastix.data.cursor import count, merge, split
from elastix.data.slice_assignment import Assignment
from elastix.events import BatchShares, Span


@dataclass(frozen=True)
class Draw:
    """A global batch that is not committed yet: whose samples are which.

    Attributes:
        spans: all of it.
        shares: by place in `members`.
        whole: it could not be split in the ratio that binds it, so who counts for anything has all.
            Their weights add up to 1, and so the mean over them is that over the batch.
        weigh: for how many samples positions count; more than there are, if some are rehearsed.
    """

    epoch: int
    members: tuple[int, ...]
    spans: tuple[Span, ...]
    shares: tuple[tuple[Span, ...], ...]
    whole: bool = False
    weigh: Callable[[Sequence[Span]], int] = field(default=count, compare=False)

    def share_of(self, worker: int) -> tuple[Span, ...]:
        """The spans of one worker; empty if the batch was planned without it."""
        return self.shares[self.members.index(worker)] if worker in self.members else ()

    def reads(self, worker: int) -> list[tuple[Span, ...]]:
        """What one worker reads of it, in order, if nobody is lost."""
        return [self.share_of(worker)]

    @property
    def ratio(self) -> Ratio:
        """In which it is split, if it is."""
        return lowest({m: self.weigh(s) for m, s in zip(self.members, self.shares, strict=True)})

    def commit(self, loader: int, contributors: Sequence[int]) -> BatchShares:
        """What counts of it, and what is owed."""
        kept = {m: s for m, s in zip(self.members, self.shares, strict=True) if m in contributors}
        kept = {member: spans for member, spans in kept.items() if spans}
        if self.whole:
            shares, whole = dict.fromkeys(list(kept)[:1], self.spans), tuple(kept)
            owed = () if kept else self.spans
        else:
            shares, whole = kept, ()
            lost = (self.share_of(m) for m in self.members if m not in contributors)
            owed = tuple(span for share in lost for span in share)
        return BatchShares(loader=loader, epoch=self.epoch, shares=shares, owed=owed, whole=whole)


@dataclass(frozen=True, kw_only=True)
class SlicedDraw(Draw):
    """One that is cut into slices. Slices of a lost worker are computed by others: nothing is owed.

    Attributes:
        slices: the positions of each. The last ones may be empty at the end of an epoch.
        assignment: whose they are.
        full: they are of the usual size.
    """

    slices: tuple[tuple[Span, ...], ...]
    assignment: Assignment
    full: bool

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """How many samples each slice has."""
        return tuple(map(self.weigh, self.slices))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The different ones, in order: one, or two in an epoch's last batch."""
        return tuple(dict.fromkeys(samples for samples in self.samples if samples))

    def reads(self, worker: int) -> list[tuple[Span, ...]]:
        """What one worker reads of it, slice by slice, if nobody is lost."""
        return [self.slices[number] for number in self.of(worker, self.members)]

    def of(self, worker: int, alive: Collection[int]) -> list[int]:
        """Numbers of the slices that fall to a worker if these are left; none that is empty."""
        owners = self.assignment.owners(alive)
        return [n for n, owner in enumerate(owners) if owner == worker and self.samples[n]]

    def handed_over(self, alive: Collection[int]) -> Mapping[tuple[int, int], int]:
        """By whose they were and who has computed them instead: how many slices."""
        moved: dict[tuple[int, int], int] = {}
        pairs = zip(self.assignment.planned, self.assignment.owners(alive), strict=True)
        for (planned, owner), samples in zip(pairs, self.samples, strict=True):
            if planned != owner and samples:
                moved[planned, owner] = moved.get((planned, owner), 0) + 1
        return moved

    def commit(self, loader: int, contributors: Sequence[int]) -> BatchShares:
        """All of it counts, unless there are no contributors."""
        if not contributors:
            return BatchShares(loader=loader, epoch=self.epoch, shares={}, owed=self.spans)
        shares = {
            worker: merge(span for number in mine for span in self.slices[number])
            for worker in contributors
            if (mine := self.of(worker, contributors))
        }
        return BatchShares(loader=loader, epoch=self.epoch, shares=shares)


def sliced(
    epoch: int,
    batch: tuple[Span, ...],
    batch_size: int,
    assignment: Assignment,
    *,
    full: bool,
    weigh: Callable[[Sequence[Span]], int] = count,
    unit: int = 1,
) -> SlicedDraw:
    """A batch cut into as many slices as the assignment has, as even as can be; see split."""
    slices = split(batch, sum(assignment.counts), batch_size, unit)
    rest = iter(slices)
    shares = tuple(
        tuple(span for _ in range(count) for span in next(rest)) for count in assignment.counts
    )
    return SlicedDraw(
        epoch=epoch,
        members=assignment.members,
        spans=batch,
        shares=shares,
        slices=slices,
        assignment=assignment,
        full=full,
        weigh=weigh,
    )

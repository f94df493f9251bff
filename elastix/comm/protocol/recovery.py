"""What survivors do with the operation in hand when they meet in a new generation. Pure.

Everything a group does together is a numbered *operation*: a training step (buckets, then a
commit round) or a plain collective (a round alone). All workers run the same operations in the
same order. An operation is *left* when its round is over; its result is kept until the next one
is left, because a peer may still need it.

Source: the forward recovery of Nicolae et al., "Towards Low-Overhead Resilience for Data Parallel
Deep Learning", CCGrid 2022; the commit round that makes it exact is our own.

Why no two survivors disagree on whether an operation counts:

- whoever leaves the round of a step saw that all members held every bucket. So if anybody alive
  left it, the others can be told (`Decision.source`);
- if nobody alive left it and all hold every bucket of one generation, the round alone is repeated:
  the buckets stand, the lost worker's share included;
- else everybody forgets its buckets before new ones are launched. A worker holds every bucket of
  generation g only if all members of g had begun to reduce in g, hence had forgotten older ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elastix.comm.protocol import calls

STATELESS = -1
"""In place of an operation's number, of a member without the State."""


@dataclass(frozen=True)
class Position:
    """Where a worker is when it enters a generation.

    Attributes:
        operation: number of the operation in hand, or about to begin; STATELESS without the State,
            or while it is not known whether all founders have it.
        complete: the generation in which it got every bucket of that operation; 0 for none.
            Stateless: the generation in which it was given the State as a founder.
        plan: the generation over whose members the batch in hand is split; 0 if not known.
        kind: which sort of operation it is in (0 while between operations), to notice workers
            that run different code.
        processor: a number for what it computes with; those of different ones round differently.
    """

    operation: int
    complete: int = 0
    plan: int = 0
    kind: int = 0
    processor: int = 0

    @property
    def has_state(self) -> bool:
        """It has the State, and knows that all founders have it."""
        return self.operation != STATELESS


@dataclass(frozen=True)
class Decision:
    """What the members of a new generation do; the same on all of them.

    Attributes:
        operation: the operation that the group goes on with.
        source: the rank that passes the result of `operation - 1` on; None if nobody lacks it.
        complete: generation whose buckets stand; 0 if all reduce again.
        plan: the generation over whose members the batch of `operation` is split.
        kind: of the operation, if somebody is already in it; else 0.
        founding: nobody has the State for sure; the donor gives its own.
        donor: the rank that gives its State to `newcomers`; None if there are none.
        newcomers: the ranks without the State, but the donor.
        gone: the ranks that the others have done an operation without: they were to leave, as all
            had agreed, and have not heard that they could; or they were taken out, and the
            controller was killed before they heard of it.
    """

    operation: int
    source: int | None
    complete: int
    plan: int
    kind: int = 0
    founding: bool = False
    donor: int | None = None
    newcomers: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()

    @property
    def begun(self) -> bool:
        """Somebody is already in the operation, so nobody may wait before it."""
        return self.kind > 0


def decide(positions: Sequence[Position], members: Sequence[int] = ()) -> Decision:
    """Decide from the positions of all members, in rank order.

    Args:
        positions: one for each member.
        members: their ids, for errors to name them; their ranks by default.

    Raises:
        TrainError: positions that no run of one program can reach.
    """
    names = members or range(len(positions))
    if any(p.has_state for p in positions):  # somebody is through with the founding: all founders
        positions = [Position(0) if p.complete and not p.has_state else p for p in positions]
    holders = [rank for rank, p in enumerate(positions) if p.has_state]
    newcomers = [rank for rank, p in enumerate(positions) if not p.has_state]
    if not holders:  # a run begins: rank 0 gives everybody its own State
        return Decision(0, None, 0, 0, founding=True, donor=0, newcomers=tuple(newcomers[1:]))
    front = max(positions[rank].operation for rank in holders)
    ahead = [rank for rank in holders if positions[rank].operation == front]
    # Whoever had a part in an operation that was left holds all of it.
    late = [rank for rank in holders if positions[rank].operation < front]
    behind = [r for r in late if positions[r].operation == front - 1 and positions[r].complete]
    gone = [rank for rank in late if rank not in behind]
    for group in (ahead, behind):
        kinds = {names[rank]: positions[rank].kind for rank in group if positions[rank].kind}
        fault = calls.apart(positions[group[0]].operation, kinds) if group else None
        if fault is not None:
            raise fault
    complete = {positions[rank].complete for rank in ahead}
    agreed = complete.pop() if len(complete) == 1 and not behind else 0
    return Decision(
        operation=front,
        source=ahead[0] if behind else None,
        complete=agreed,
        plan=max(positions[rank].plan for rank in ahead),
        kind=max(positions[rank].kind for rank in ahead),
        donor=ahead[0] if newcomers else None,
        newcomers=tuple(newcomers),
        gone=tuple(gone),
    )

"""The catch-up stream: what a joiner is told by the peer that it follows. Values only; pure.

Not here: the wire, and both its ends (catch_up_stream); what the joiner does with what it is told
(joiner).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from elastix.state import State


@dataclass
class Given:
    """The State that a joiner begins with.

    Attributes:
        operation: the next one after the State's boundary.
        layout: the donor's.
    """

    operation: int
    layout: list[str]
    state: State = field(repr=False)


@dataclass(frozen=True)
class Watched:
    """How one operation ended, for somebody who did not take part.

    Attributes:
        plan: the workers over which its batch was split.
        contributors: the workers whose share counts.
        complete: the generation that they are the members of.
        generation: in which it was left.
        result: of its round.
        parts: what else the operation hands over, flat.
    """

    operation: int
    kind: int
    plan: tuple[int, ...]
    contributors: tuple[int, ...]
    complete: int
    generation: int
    result: torch.Tensor
    parts: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Entering:
    """The donor enters `generation`, of which the joiner is a member, at this very boundary."""

    generation: int


@dataclass(frozen=True)
class DigestMark:
    """The donor takes a digest of its State as it is at this very boundary."""


@dataclass(frozen=True)
class Digest:
    """The digest of the State at the mark before it."""

    digest: str


Told = Watched | Entering | DigestMark | Digest


class CatchUpStream(Protocol):
    """The joiner's end. None of its methods blocks.

    Attributes:
        given: the State; None until it is there.
        failed: the connection has ended; what was told before stays.
    """

    given: Given | None
    failed: bool

    @property
    def head(self) -> Told | None:
        """What comes next; None if nothing was told that is not used."""
        ...

    @property
    def backlog(self) -> int:
        """How much was told and is not used."""
        ...

    def pop(self) -> Told:
        """Use what comes next."""
        ...

    def ask_digest(self) -> None:
        """Ask the donor for the digest of its State at its next boundary."""
        ...

    def say_able(self, able: bool) -> None:
        """Tell the donor whether this shadow can store States."""
        ...

    def close(self) -> None:
        """No more of it."""
        ...

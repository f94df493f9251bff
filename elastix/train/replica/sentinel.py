"""Which bytes of the State are hashed in a step, so that replicas that part are found. Pure.

All workers must choose the same bytes without asking each other. So the choice is a function of
what all of them have: the sizes of the tensors, and numbers that were agreed on in commit rounds.

A small State is hashed whole in every step. Of a larger one so much is, from one step to the next
in turn, that all of it has had its turn within a minute, but no more than takes one percent of the
time that steps take. The next pass begins a minute after this one did, at the earliest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHARE = 0.01
"""How much of a step hashing may take, for a State that is not small."""

BYTES_PER_US = 1000
"""How fast a core hashes: slower than measured, by far, on any machine that anybody trains on."""

SMALL = 256 << 10
"""A State that costs no more than this is hashed whole in every step."""

TENSOR_COST = 4 << 10
"""A tensor costs as much as so many bytes, beside its own."""

_PASS_US = 60_000_000
_FIRST_US = 1000
_LONGEST_US = 3_600_000_000


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `stop` of the tensor at this place in the list of all."""

    place: int
    start: int
    stop: int


class Rotation:
    """Whose turn it is. Part of the State, since a joiner must choose as the others do.

    Attributes:
        step_us: how long a step takes, as far as all know: it doubles at most from one to the
            next, so that a step in which all waited for something costs nothing in the one after.
        whole: all of the State was compared in the last step that counts, or none was taken yet.
        passes: how often a pass has ended, as this worker has seen; no part of the State.
    """

    def __init__(self) -> None:
        self.step_us = _FIRST_US
        self.whole = True
        self.passes = 0
        self._at = 0  # up to here this pass has come, in costs
        self._passing_us = 0  # since it began

    def pieces(self, sizes: Sequence[int]) -> list[Piece]:
        """What is hashed in the step in hand.

        Args:
            sizes: of all tensors in bytes, in an order that all workers have.
        """
        total = _cost(sizes)
        budget = self._budget(total)
        if total <= budget:
            return all_of(sizes)
        start, stop = self._at, self._at + budget
        if start >= total:
            return []
        found, here = [], 0
        for place, size in enumerate(sizes):
            if here >= stop:
                break
            piece = Piece(place, max(0, start - here), min(size, stop - here))
            if piece.start < piece.stop:
                found.append(piece)
            here += size + TENSOR_COST
        return found

    def committed(self, sizes: Sequence[int], step_us: int) -> None:
        """A step counts, and `pieces` of it were found equal.

        Args:
            sizes: as they were then.
            step_us: how long it took the slowest worker.
        """
        total = _cost(sizes)
        budget = self._budget(total)
        self.whole = total <= budget
        self._passing_us += self.step_us
        self._at = min(total, self._at + budget)  # all of it: the rest of the pass is a rest
        if self.whole or (self._at == total and self._passing_us >= _PASS_US):
            self._at, self._passing_us = 0, 0
            self.passes += 1
        self.step_us = max(_FIRST_US, min(step_us, 2 * self.step_us, _LONGEST_US))

    def _budget(self, total: int) -> int:
        """How much of a State that costs `total` has its turn in a step of `step_us`."""
        in_a_minute = -(-total * self.step_us // _PASS_US)
        return max(SMALL, min(in_a_minute, int(self.step_us * SHARE * BYTES_PER_US)))

    def state_dict(self) -> dict[str, int]:
        """As it is between two steps."""
        return {
            "step_us": self.step_us,
            "whole": int(self.whole),
            "at": self._at,
            "passing_us": self._passing_us,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """As it was; States of before have nothing."""
        self.step_us = state_dict.get("step_us", _FIRST_US)
        self.whole = bool(state_dict.get("whole", 0))
        self._at = state_dict.get("at", 0)
        self._passing_us = state_dict.get("passing_us", 0)


def all_of(sizes: Sequence[int]) -> list[Piece]:
    """Every byte of tensors of these sizes."""
    return [Piece(place, 0, size) for place, size in enumerate(sizes)]


def _cost(sizes: Sequence[int]) -> int:
    return sum(sizes) + TENSOR_COST * len(sizes)

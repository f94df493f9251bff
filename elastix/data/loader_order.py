"""In which order the loaders of a run take turns, as far as that can be seen. Pure.

A train function that goes by a counter of its own (`loaders[number % 2]`) begins with the first one
again when the run is continued. So the last turns are part of the State, and whether the first step
after that goes on with them is looked at.
"""

from collections.abc import Iterable

_LONGEST = 12
_TIMES = 3

REMEMBERED = _LONGEST * _TIMES
"""So many turns are kept."""


def expected(turns: Iterable[int]) -> int | None:
    """Whose turn comes next; None if they do not take turns regularly.

    Regularly: the last ones are one sequence of several loaders, three times over.
    """
    so_far = list(turns)
    for length in range(2, _LONGEST + 1):
        last = so_far[-_TIMES * length :]
        if len(last) < _TIMES * length or len(set(last)) < 2:
            continue
        if last[:length] * _TIMES == last:
            return last[0]
    return None

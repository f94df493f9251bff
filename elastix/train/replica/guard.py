"""Whether a step may count: what the guard says of its gradient and of a reported loss. Pure.

Both come from the commit round of the step, which takes the highest of all workers. So each of
them judges the same numbers by the same history, and a joiner that follows the group does, too.

Too large is a number above all of the last ones that counted, whose logarithm lies further from
their median than so many times their usual distance from it (the median of these distances, scaled
to be a standard deviation where numbers scatter normally). Outliers hardly move either of them.
"""

import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from elastix.config import Guard
from elastix.errors import TrainingUnstable

ABSENT = -(2**63) + 1
"""In place of a number, from whoever has none. Its negative fits an int64 as well."""

_MAGNITUDE = 2**63 - 1
_NORMAL = 1.4826  # times the median distance: a standard deviation
_PASSES = 1000  # on one batch: more than any loop makes that ends by itself
_LEAST = 0.2  # of a logarithm: numbers that hardly scatter may begin to


def ordered(value: float) -> int:
    """As an int64 in the order of the numbers; above all others, one that is not a number."""
    (bits,) = struct.unpack("<q", struct.pack("<d", math.nan if math.isnan(value) else value))
    return int(bits) if bits >= 0 else -(bits & _MAGNITUDE) - 1


def number(bits: int) -> float | None:
    """The inverse of `ordered`; None for ABSENT."""
    if bits == ABSENT:
        return None
    raw = bits if bits >= 0 else -(bits + 1) - 2**63
    (value,) = struct.unpack("<d", struct.pack("<q", raw))
    return float(value)


@dataclass(frozen=True)
class Alarm:
    """Why a step is void.

    Attributes:
        what: "gradient", or the name of a metric.
        value: the norm, or what was reported.
        usual: the median of the last ones; not a number before there were enough.
    """

    what: str
    value: float
    usual: float

    def __str__(self) -> str:
        name = "the gradient's norm" if self.what == "gradient" else f"the reported {self.what}"
        if not math.isfinite(self.value):
            return f"{name} is not finite"
        return f"{name} is {self.value:.3g}, usually {self.usual:.3g}"


class _Spread:
    """The last numbers of one kind, as logarithms; those that have none cannot be too large."""

    def __init__(self, guard: Guard, logarithms: Iterable[float] = ()) -> None:
        self._guard = guard
        self.logarithms = deque(logarithms, guard.window)

    @property
    def usual(self) -> float:
        """The median; not a number before there are enough."""
        if len(self.logarithms) < self._guard.warmup:
            return math.nan
        return math.exp(median(self.logarithms))

    def take(self, value: float | None) -> None:
        """One more, which counts."""
        if value is not None and value > 0:
            self.logarithms.append(math.log(value))

    def strange(self, value: float) -> bool:
        """Whether a step with this value is not to count."""
        if not math.isfinite(value):
            return True
        seen, spike = self.logarithms, self._guard.spike
        if spike is None or len(seen) < self._guard.warmup or value <= 0:
            return False
        here = math.log(value)
        if here <= max(seen):  # as far out as one that counts: this is cheap, and nearly always so
            return False
        middle = median(seen)
        spread = _NORMAL * median(abs(there - middle) for there in seen)
        return here - middle > spike * max(spread, _LEAST)


class Watch:
    """What one worker knows of the steps so far, and its judgement. Part of the State."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._gradient = _Spread(guard)
        self._metric = _Spread(guard)
        self._void: deque[int] = deque(maxlen=guard.most + 1)
        self._steps = 0
        self._further = 0  # passes that did not count either, on the batch of the last one

    def judge(self, norm: float | None, metric: float | None) -> Alarm | None:
        """What is wrong with a step; None if it may count. Changes nothing.

        Args:
            norm: of the averaged gradient; None if there is none to judge.
            metric: as reported; None if it was not.
        """
        for what, value, spread in (
            ("gradient", norm, self._gradient),
            (self._guard.metric or "", metric, self._metric),
        ):
            if value is not None and spread.strange(value):
                return Alarm(what, value, spread.usual)
        return None

    def counted(self, norm: float | None, metric: float | None) -> None:
        """A step counts."""
        self._steps += 1
        self._gradient.take(norm)
        self._metric.take(metric)

    def voided(self, step: int, alarm: Alarm, *, again: bool = False) -> TrainingUnstable | None:
        """A step does not count; the error that ends the run if that was once too often.

        Passes on one batch that do not count count as one, as far as a loop comes to an end. They
        are one step of the window, too: however many there are on each batch, if all batches are
        bad the window has more than `most`.

        Args:
            step: the number that it would have had.
            alarm: why.
            again: it is a further pass on the batch of the last one that did not count.
        """
        self._further = self._further + 1 if again else 0
        if 0 < self._further < _PASSES:
            return None
        self._steps += 1
        self._void.append(self._steps)
        among = self._steps - self._void[0] + 1
        if len(self._void) <= self._guard.most or among > self._guard.window:
            return None
        return TrainingUnstable(
            f"the guard has voided {len(self._void)} of the last {among} steps, and Guard.most is "
            f"{self._guard.most}; the last was step {step}: {alarm}. It seems not to be a matter "
            "of single batches, so the run was stopped; calling fit() again goes on from the last "
            "stored State. Lower the learning rate, clip gradients, or look at the data; "
            "RestoreConfig(step=...) goes back further."
        )

    def state_dict(self) -> dict[str, Any]:
        """As it is between two steps."""
        return {
            "gradient": list(self._gradient.logarithms),
            "metric": list(self._metric.logarithms),
            "void": list(self._void),
            "steps": self._steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As it was; States of runs without a guard have nothing."""
        self._gradient = _Spread(self._guard, state_dict.get("gradient", ()))
        self._metric = _Spread(self._guard, state_dict.get("metric", ()))
        self._void = deque(state_dict.get("void", ()), self._guard.most + 1)
        self._steps = state_dict.get("steps", 0)

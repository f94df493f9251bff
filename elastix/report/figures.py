"""What a plot of the page is: a plain plotly figure, dicts of `data` and `layout`. Pure.

Colours are names with a leading "@" that the page resolves for light and dark ("@loss"; "@0" is
the first of a series). Text from a user is a plain str and is escaped by the page, since plotly
reads tags in labels; markup of our own is a Markup.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from markupsafe import Markup, escape

BREAK = Markup("<br>")
HOVER = Markup("%{text}<extra></extra>")

Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One plot of the page.

    Attributes:
        id: of its element.
        title: above it.
        caption: what can be seen there, for those who see it and those who hear it.
        figure: for plotly.
        wide: takes the whole width of the page.
        min_width: pixels; a narrower screen scrolls.
    """

    id: str
    title: str
    caption: str
    figure: Mapping[str, Any]
    wide: bool = False
    min_width: int = 0


def figure(data: Sequence[Trace], height: int = 300, **layout: Any) -> dict[str, Any]:  # noqa: ANN401
    """Traces with what differs from the page's usual layout."""
    return {"data": list(data), "layout": {"height": height, **layout}}


def axis(title: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - what plotly knows of an axis
    """An axis with a title."""
    return {"title": {"text": title}, **more}


def metric_axis(title: str = "") -> dict[str, Any]:
    """An axis of values that users report: 0.0005 and 2e-7, which plotly calls 500μ and 200n.

    With nine digits at most: a loss that hardly moves would have the same six at every tick.
    """
    return axis(title, tickformat=".9~g")


def stacked(*parts: object) -> Markup:
    """Parts under each other; what is no Markup is escaped."""
    return BREAK.join(escape(part) for part in parts)


def upright(x: float) -> dict[str, Any]:
    """A dotted line over the whole height."""
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def finite(value: float) -> float | None:
    """What JSON can say; a gap in the line where it cannot."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Clock:
    """Seconds, minutes, hours or days, whichever reads well over a span."""

    unit: str
    factor: float

    @classmethod
    def over(cls, span_s: float) -> Self:
        """For times from 0 to `span_s` seconds."""
        for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
            if span_s > 2 * factor:
                return cls(unit, factor)
        return cls("s", 1.0)

    def __call__(self, seconds: float) -> float:
        """In the unit."""
        return round(seconds / self.factor, 4)

    def axis(self, what: str) -> dict[str, Any]:
        """An axis of times since `what` began."""
        return axis(f"time since the {what} began, {self.unit}", rangemode="tozero")

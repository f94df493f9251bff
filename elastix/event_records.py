"""Events as JSON values, and back: what a line of a journal holds.

A journal may be of an earlier version, or damaged: what is no event, or has fields that no reader
could go by, is refused here, and not where it is used.

Invariant: `from_record(to_record(event)) == event`, through json.dumps and json.loads.
"""

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from elastix import events
from elastix.errors import Corrupt
from elastix.events import (
    BatchShares,
    Event,
    GenerationFormed,
    LoaderOpened,
    ProcessorsDiffer,
    ReplicasCompared,
    ReplicasDiverged,
    SamplesLeftOut,
    ShadowDiffers,
    SlicesHandedOver,
    Span,
    StepCommitted,
    WorkersMeasured,
    WorkerStarted,
)

_LAST_T = 4e10  # seconds; dates of later times have no name everywhere

_EVENTS: dict[str, type[Event]] = {
    name: cls
    for name, cls in vars(events).items()
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}


def to_record(event: Event) -> dict[str, Any]:
    """An event as JSON values, its class under "event"."""
    record = {"event": type(event).__name__, **vars(event)}
    if isinstance(event, StepCommitted):
        record["batches"] = [_of_batch(batch) for batch in event.batches]
    return record


def _of_batch(batch: BatchShares) -> dict[str, Any]:
    """Without what is so nearly always: there is one in each line of a journal."""
    return {name: value for name, value in vars(batch).items() if name != "passed" or not value}


def from_record(record: Any) -> Event:  # noqa: ANN401 - straight from json.loads
    """The inverse of to_record, from what json.loads gives.

    Raises:
        Corrupt: no such event, or fields that do not fit it.
    """
    if not isinstance(record, Mapping):
        raise Corrupt(f"{record!r} is no record of an event.")
    values = dict(record)
    cls = _EVENTS.get(str(values.pop("event", None)))
    if cls is None:
        raise Corrupt(f"{record.get('event')!r} is no event that this version of elastix knows.")
    try:
        if cls is StepCommitted:
            values["batches"] = tuple(_batch(batch) for batch in values["batches"])
        if cls is SamplesLeftOut:
            values["spans"] = _spans(values["spans"])
        if cls is LoaderOpened:
            values["blocks"] = _spans(values.get("blocks", ()))
            values["before"] = _spans(values.get("before", ()))
        if cls is SlicesHandedOver:
            values["moved"] = tuple((int(a), int(b), int(n)) for a, b, n in values["moved"])
        if cls is WorkersMeasured:
            values["workers"] = {int(worker): row for worker, row in values["workers"].items()}
        if cls is WorkerStarted:
            values["mates"] = tuple((str(n), int(pid)) for n, pid in values.get("mates", ()))
        if cls is GenerationFormed:
            values["members"] = tuple(values["members"])
        values |= _compared(cls, values)
        event = cls(**values)
        _check_fields(event)
        return event
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Corrupt(f"a record of {cls.__name__} has the wrong fields: {error}.") from error


def _compared(cls: type[Event], values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an event that compares workers, as they are in it and not in JSON."""
    if cls in (ReplicasCompared, ReplicasDiverged):
        return {name: tuple(values[name]) for name in ("workers", "apart", "parts")}
    if cls is ShadowDiffers:
        return {"parts": tuple(values.get("parts", ()))}
    if cls is ProcessorsDiffer:
        return {"kinds": {kind: tuple(map(int, who)) for kind, who in values["kinds"].items()}}
    return {}


def _check_fields(event: Event) -> None:
    """That plain fields are what they are said to be: what reads an event goes by it."""
    for name, allowed in _plain_fields(type(event)).items():  # type: ignore[arg-type]
        value = getattr(event, name)
        if not isinstance(value, allowed):
            raise TypeError(f"{name}={str(value)[:40]!r}")
    if not abs(event.t) <= _LAST_T:  # of which NaN is no part
        raise ValueError(f"t={str(event.t)[:40]} is no time")


@cache
def _plain_fields(cls: type[Event]) -> Mapping[str, tuple[type, ...]]:
    """By name, what may stand in a field; without those that hold other things than JSON does."""
    numbers = (int, float)
    kinds: dict[Any, tuple[type, ...]] = {kind: (kind,) for kind in (str, bool, Mapping, NoneType)}
    kinds |= {int: numbers, float: numbers}
    found = {}
    for name, hint in get_type_hints(cls).items():
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        allowed = [kinds.get(get_origin(part) or part) for part in parts]
        if None not in allowed:
            found[name] = tuple(kind for some in allowed if some for kind in some)
    return found


def _batch(values: Mapping[str, Any]) -> BatchShares:
    return BatchShares(
        loader=values["loader"],
        epoch=values["epoch"],
        shares={int(worker): _spans(spans) for worker, spans in values["shares"].items()},
        owed=_spans(values["owed"]),
        whole=tuple(map(int, values.get("whole", ()))),
        passed=values.get("passed", True) is not False,
    )


def _spans(values: Any) -> tuple[Span, ...]:  # noqa: ANN401 - straight from json.loads
    return tuple((int(start), int(stop)) for start, stop in values)

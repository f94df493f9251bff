"""Events survive a line of JSON; what is no record of one is said to be corrupt."""

import dataclasses
import json
import types
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix import event_records, events
from elastix.errors import Corrupt
from elastix.event_records import from_record, to_record
from elastix.events import BatchShares, Event, Resumed, StepCommitted

spans = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple)
json_values = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=3
)
batches = st.builds(
    BatchShares,
    loader=st.integers(0, 3),
    epoch=st.integers(0, 9),
    shares=st.dictionaries(st.integers(0, 99), spans, max_size=3),
    owed=spans,
    whole=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


def strategy_of(annotation) -> st.SearchStrategy:
    if annotation == tuple[BatchShares, ...]:
        return st.lists(batches, max_size=2).map(tuple)
    if annotation == typing.get_type_hints(events.WorkersMeasured)["workers"]:
        return st.dictionaries(st.integers(0, 99), st.dictionaries(st.text(), st.integers()))
    if annotation == typing.get_type_hints(events.ProcessorsDiffer)["kinds"]:
        workers = st.lists(st.integers(0, 99), max_size=3).map(tuple)
        return st.dictionaries(st.text(max_size=9), workers, max_size=3)
    if annotation == tuple[events.Span, ...]:
        return spans
    if annotation == tuple[tuple[int, int, int], ...]:
        return st.lists(st.tuples(*[st.integers(0, 99)] * 3), max_size=3).map(tuple)
    if annotation == tuple[tuple[str, int], ...]:
        return st.lists(st.tuples(st.text(max_size=9), st.integers(0, 99)), max_size=3).map(tuple)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(strategy_of, typing.get_args(annotation)))
    if annotation == tuple[str, ...]:
        return st.lists(st.text(max_size=9), max_size=3).map(tuple)
    if origin is tuple:
        return st.lists(st.integers(0, 99), max_size=4).map(tuple)
    if isinstance(origin, type):
        return json_values
    plain = {
        int: st.integers(),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain[annotation]


def instances(cls: type[Event]) -> st.SearchStrategy[Event]:
    hints = typing.get_type_hints(cls)
    fields = {f.name: strategy_of(hints[f.name]) for f in dataclasses.fields(cls)}
    return st.builds(cls, **(fields | {"t": st.floats(-4e10, 4e10)}))  # times that have a date


def subclasses(cls: type) -> set[type]:
    return {cls, *(deep for sub in cls.__subclasses__() for deep in subclasses(sub))}


def test_every_event_class_can_be_read_back():
    here = {c for c in subclasses(Event) - {Event} if c.__module__ == events.__name__}
    assert here == set(event_records._EVENTS.values())


@pytest.mark.parametrize("cls", event_records._EVENTS.values(), ids=event_records._EVENTS)
@settings(max_examples=25)  # of each of the classes
@given(data=st.data())
def test_every_event_survives_json(cls, data):
    event = data.draw(instances(cls))
    assert from_record(json.loads(json.dumps(to_record(event)))) == event


def test_a_record_names_its_class():
    assert to_record(Resumed(t=1.5, step=3, ref="ab")) == {
        "event": "Resumed",
        "t": 1.5,
        "step": 3,
        "ref": "ab",
        "held": False,
        "sequence": 0,
        "again": 0,
    }


GOOD = to_record(Resumed(t=1.5, step=3, ref="ab"))
STEP = json.loads(
    json.dumps(
        to_record(
            StepCommitted(
                step=1,
                generation=1,
                world_size=1,
                batches=(BatchShares(loader=0, epoch=0, shares={0: ((0, 4),)}),),
            )
        )
    )
)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"event": "Nonsense"},
        {"event": None, "step": 1},
        {"event": "Event"},
        {k: v for k, v in GOOD.items() if k != "step"},
        {**GOOD, "more": 1},
        {**STEP, "batches": 3},
        {**STEP, "batches": [3]},
        {**STEP, "batches": [{"loader": 0}]},
        {**STEP, "batches": [{**STEP["batches"][0], "shares": {"x": [[0, 4]]}}]},
        {**STEP, "batches": [{**STEP["batches"][0], "shares": {"0": [[0, 4, 5]]}}]},
        {**STEP, "batches": [{**STEP["batches"][0], "shares": [1]}]},
        {k: v for k, v in STEP.items() if k != "batches"},
    ],
)
def test_a_record_that_is_no_event_is_corrupt(record):
    with pytest.raises(Corrupt):
        from_record(record)


def test_an_unknown_event_is_named():
    with pytest.raises(Corrupt, match="'Nonsense'"):
        from_record({"event": "Nonsense"})

"""Events: plain data; a bus that keeps their order."""

import dataclasses

import pytest

from elastix import events
from elastix.events import Event, Events, Resumed


def _is_event(found):
    return isinstance(found, type) and issubclass(found, Event)


@pytest.mark.parametrize("cls", [c for c in vars(events).values() if _is_event(c)])
def test_events_are_frozen_and_keyword_only(cls):
    assert cls.__dataclass_params__.frozen
    assert all(f.kw_only for f in dataclasses.fields(cls))


def test_the_bus_calls_subscribers_in_the_order_they_came():
    bus, heard = Events(), []
    bus.subscribe(lambda event: heard.append(("first", event.step)))
    bus.emit(Resumed(step=1, ref=""))
    bus.subscribe(lambda event: heard.append(("second", event.step)))
    bus.emit(Resumed(step=2, ref=""))
    assert heard == [("first", 1), ("first", 2), ("second", 2)]

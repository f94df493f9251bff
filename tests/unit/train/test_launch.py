"""What the driver says of a run that is interrupted, however that ends."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from elastix.errors import Interrupted, TrainError
from elastix.train.on_ray import launch
from elastix.train.on_ray.controller import Followed

FINISHED = SimpleNamespace(ref="state", metrics={}, audit=None)


class Said(nullcontext):
    """A console that notes with which words the run ends."""

    def __init__(self):
        self.last = []

    def __enter__(self):
        return self

    def __getattr__(self, name):
        return lambda *_, **__: self.last.append(name)


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        (Followed([], over=True, error=Interrupted("it was stopped")), "interrupted"),
        (Followed([], over=True, error=TrainError("no memory")), "failed"),
        (Followed([], over=True), "finished"),
        (None, "interrupted"),  # that was not heard
    ],
)
def test_what_is_said_after_ctrl_c_is_how_the_run_ended(monkeypatch, ended, says):
    def interrupted():
        raise KeyboardInterrupt

    said = Said()
    view = SimpleNamespace(follow=interrupted, stop=lambda reason: ended)
    monkeypatch.setattr(launch, "Deaths", nullcontext)
    monkeypatch.setattr(launch, "Console", lambda *_, **__: said)
    monkeypatch.setattr(launch, "DriverView", lambda *_: view)
    monkeypatch.setattr(launch.ray, "kill", lambda controller: None)
    monkeypatch.setattr(launch, "Result", SimpleNamespace(of=lambda *_: FINISHED))
    one = object.__new__(launch.Launch)
    one._directory = None
    one._listen = lambda feed, deaths: None
    one._asked = SimpleNamespace(
        run=SimpleNamespace(detached=False, name="r", store="s"),
        loggers=(),
        failure=SimpleNamespace(guard=None),
        checkpoint=SimpleNamespace(best=None),
        quiet=False,
        profile=None,
    )
    with pytest.raises(KeyboardInterrupt):
        one._follow(None, None)
    assert said.last == [says]

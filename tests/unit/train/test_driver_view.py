"""What a driver tells of its controller while that does not answer."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError

from elastix.train.on_ray import driver_view
from elastix.train.on_ray.controller import Followed


class Said:
    """A console that counts."""

    def __init__(self):
        self.lost = 0

    def leaderless(self):
        self.lost += 1

    def show(self, event):
        pass

    def tick(self):
        pass

    def stopping(self):
        pass


NEWS, OVER = Followed([]), Followed([], over=True)
CONTROLLER = SimpleNamespace(follow=SimpleNamespace(remote=lambda *_: None))


@pytest.mark.parametrize(
    ("answers", "lost"),
    [
        ([GetTimeoutError(), GetTimeoutError(), NEWS, OVER], 0),  # it was slow to start
        ([NEWS, GetTimeoutError(), GetTimeoutError(), OVER], 1),
        ([RayActorError(), OVER], 1),
        ([NEWS, RayActorError(), NEWS, RayActorError(), OVER], 2),
    ],
)
def test_lost_is_who_was_there(monkeypatch, answers, lost):
    rest = iter(answers)

    def get(_asked, timeout):
        answer = next(rest)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(driver_view.ray, "get", get)
    said = Said()
    assert driver_view.DriverView(CONTROLLER, said).follow().over
    assert said.lost == lost


class Scripted:
    """A controller that answers as it is told to, and notes what it is asked."""

    def __init__(self, monkeypatch, *answers):
        self.asked = []
        self._answers = iter(answers)
        for name in ("stop", "status", "follow"):
            remote = SimpleNamespace(remote=lambda *_, name=name: self.asked.append(name))
            setattr(self, name, remote)
        monkeypatch.setattr(driver_view.ray, "get", self._get)
        monkeypatch.setattr(driver_view, "_AGAIN_S", 0.0)

    def _get(self, _asked, timeout):
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer


GONE = ActorUnavailableError("it is started anew", None)


def test_who_stops_a_run_goes_through_the_death_of_its_controller(monkeypatch):
    """One that had heard of it before it died is not asked again: that would not wait."""
    heard = {"stopping": True, "over": False}
    controller = Scripted(monkeypatch, GONE, GONE, heard, NEWS, RayActorError(), OVER)
    driver_view.DriverView(controller, Said()).stop("Ctrl-C")
    assert controller.asked == ["stop", "status", "status", "follow", "follow", "follow"]


def test_a_successor_that_has_not_heard_that_it_is_to_stop_is_asked(monkeypatch):
    controller = Scripted(monkeypatch, GONE, {"stopping": False, "over": False}, None)
    assert driver_view.ask_to_stop(controller, "stopped", 60.0)
    assert controller.asked == ["stop", "status", "stop"]


def test_nobody_is_asked_where_there_is_no_successor(monkeypatch):
    controller = Scripted(monkeypatch, ActorDiedError())
    driver_view.DriverView(controller, Said()).stop("Ctrl-C")
    with pytest.raises(ActorDiedError):
        driver_view.ask_to_stop(Scripted(monkeypatch, ActorDiedError()), "stopped", 60.0)


@pytest.mark.parametrize(
    "answers",
    [
        [KeyboardInterrupt(), None, NEWS, OVER],
        [None, KeyboardInterrupt(), NEWS, OVER],
        [None, NEWS, KeyboardInterrupt(), OVER],
    ],
)
def test_a_ctrl_c_that_comes_twice_within_a_moment_is_one(monkeypatch, answers):
    """A terminal sends it to all programs of a group, and some of them pass it on."""
    controller = Scripted(monkeypatch, *answers)
    driver_view.DriverView(controller, Said()).stop("Ctrl-C")
    assert next(controller._answers, None) is None


def test_a_later_ctrl_c_does_not_wait(monkeypatch):
    monkeypatch.setattr(driver_view, "MOMENT_S", -1.0)
    controller = Scripted(monkeypatch, None, NEWS, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        driver_view.DriverView(controller, Said()).stop("Ctrl-C")


def test_a_campaign_that_ends_its_trial_does_not_wait(monkeypatch):
    def watch(_events):
        raise KeyboardInterrupt

    controller = Scripted(monkeypatch, NEWS, None, NEWS)
    view = driver_view.DriverView(controller, Said(), watch)
    for does in (view.follow, lambda: view.stop("Ctrl-C")):
        with pytest.raises(KeyboardInterrupt):
            does()
    assert controller.asked == ["follow", "stop", "follow"]


def test_a_run_that_is_being_stopped_is_waited_for(monkeypatch):
    """Who attached to it would be told that somebody has stopped it."""
    ends, over = {"stopping": True, "over": False}, {"stopping": True, "over": True}
    assert driver_view.is_over(Scripted(monkeypatch, ends, ends, over))
    assert not driver_view.is_over(Scripted(monkeypatch, {"stopping": False, "over": False}))

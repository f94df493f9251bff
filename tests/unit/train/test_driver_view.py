"""What a driver tells of its controller while that does not answer."""

from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

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

"""What a worker says of its way in the group."""

from types import SimpleNamespace

import pytest

from elastix.comm.protocol.calls import OperationKind
from elastix.comm.protocol.participant import Joined, Recovery
from elastix.events import Recovered, ShadowDiffers, WorkerJoined
from elastix.train.checkpoint import state_digests
from elastix.train.control.messages import CaughtUp, Entered, Succeeded, Suspect
from elastix.train.replica.group_news import GroupNews


class Desk:
    """A worker that has taken `step` steps, and all that it has said."""

    def __init__(self, monkeypatch, *, step=5, shadow=False, foreign=False):
        self.said, self.ready, self.places = [], 0, []
        self.driver = SimpleNamespace(shadow=shadow)
        replicated = SimpleNamespace(
            since=3, sequence=40, send_again=lambda: self.said.append("again")
        )
        link = SimpleNamespace(send=self.said.append, emit=self.said.append)
        parts = SimpleNamespace(
            me=7,
            link=link,
            driver=self.driver,
            replicated=replicated,
            phase=lambda *place: self.places.append(place),
        )
        checks = SimpleNamespace(entered=lambda: None)
        steps = SimpleNamespace(step=step, foreign=foreign, checks=checks)
        self.news = GroupNews(parts, steps, self.is_ready)
        monkeypatch.setattr(state_digests, "apart", lambda mine, theirs: (mine, theirs))

    def is_ready(self):
        self.ready += 1


@pytest.fixture
def desk(monkeypatch):
    return lambda **options: Desk(monkeypatch, **options)


def test_a_shadow_that_has_parted_says_so_once_for_each_difference(desk):
    one = desk(shadow=True)
    for followed, theirs in ((0, "b"), (0, "b"), (0, "c"), (1, "c")):
        one.news.unequal(9, followed, "a", theirs)
    assert [(event.followed, event.parts) for event in one.said] == [
        (0, ("a", "b")),
        (0, ("a", "c")),
        (1, ("a", "c")),
    ]
    assert all(type(event) is ShadowDiffers and event.worker == 7 for event in one.said)
    assert one.places == [("unequal", 9)] * 4


def test_a_joiner_that_has_parted_says_nothing(desk):
    one = desk()
    one.news.unequal(9, 0, "a", "b")
    assert one.said == []


@pytest.mark.parametrize("foreign", [False, True])
def test_who_succeeds_says_how_far_it_has_come_and_whether_it_is_equal(desk, foreign):
    one = desk(shadow=True, foreign=foreign)
    one.news.succeed(equal=True)
    one.news.succeed(equal=False)
    first, second = one.said
    assert first == Succeeded(step=5, since=3, sequence=40, equal=not foreign)
    assert not second.equal


def test_who_has_entered_tells_again_what_it_knows_that_the_journal_may_lack(desk):
    one = desk()
    one.news.entered(4, Joined(copy_s=1.5, copy_bytes=10, watched_steps=2))
    entered, joined, again = one.said
    assert (entered, again) == (Entered(4), "again")
    assert type(joined) is WorkerJoined
    assert (joined.worker, joined.step, joined.watched_steps) == (7, 5, 2)


@pytest.mark.parametrize(
    ("step", "joined"), [(0, Joined(copy_s=1.5, copy_bytes=10)), (5, None)], ids=["first", "member"]
)
def test_who_founds_the_group_or_was_in_it_has_not_joined(desk, step, joined):
    one = desk(step=step)
    one.news.entered(4, joined)
    assert one.said == [Entered(4), "again"]


@pytest.mark.parametrize(
    ("kind", "step"), [(OperationKind.STEP, 6), (OperationKind.MEAN, 5), (0, 5)]
)
def test_a_recovery_within_a_step_is_one_of_the_step_that_does_not_count_yet(desk, kind, step):
    one = desk()
    one.news.recovered(Recovery(4, kind, "kept", 0.1, 0.2))
    (event,) = one.said
    assert type(event) is Recovered
    assert (event.step, event.generation, event.outcome) == (step, 4, "kept")


def test_the_rest_is_passed_on_as_it_is(desk):
    one = desk()
    one.news.level(equal=False)
    one.news.doubt(4, ValueError("no"), frozenset({2}))
    one.news.lonely()
    assert one.said == [CaughtUp(equal=False), Suspect(4, "ValueError('no')", frozenset({2}))]
    assert one.ready == 1

"""Roster: tables for each occurrence, then random lives of a group."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastix.comm.protocol.membership import Membership, Roster


def founded(*members: int, size: int | None = None, min_workers: int = 1) -> Roster:
    """A group of `members`, all of which have the State; generation 1."""
    roster = Roster(len(members), size, min_workers)
    for worker in members:
        roster.ready(worker)
    for worker in members:
        roster.entered(worker, 1)
    return roster


def come(roster: Roster, worker: int) -> Membership | None:
    """A worker is ready and, if it has to, catches up at once."""
    roster.ready(worker)
    if worker in roster.watching:
        return roster.level(worker)
    return roster.newest if worker in roster.newest.members else None


def brief(membership: Membership | None) -> tuple | None:
    if membership is None:
        return None
    return membership.generation, membership.members, membership.urgent, membership.cause


def test_rank_and_size_follow_the_order_of_members():
    membership = Membership(3, (5, 2, 9))
    assert membership.size == 3
    assert [membership.rank(worker) for worker in (5, 2, 9)] == [0, 1, 2]
    with pytest.raises(ValueError):
        membership.rank(4)


def test_founding_waits_for_all_founders_and_starts_in_the_order_of_ids():
    roster = Roster(founders=3)
    assert roster.ready(2) is None
    assert roster.ready(0) is None
    assert brief(roster.ready(1)) == (1, (0, 1, 2), True, "start")
    assert roster.joining == (0, 1, 2)
    assert list(roster.waiting) == []


def test_a_worker_that_dies_while_it_waits_is_not_admitted():
    roster = Roster(founders=2)
    roster.ready(0)
    assert roster.lost(0) is None
    assert roster.ready(1) is None
    assert brief(roster.ready(2)) == (1, (1, 2), True, "start")


def test_a_founder_that_dies_leaves_the_founding_to_the_others():
    roster = Roster(founders=3)
    for worker in (0, 1, 2):
        roster.ready(worker)
    assert brief(roster.lost(1)) == (2, (0, 2), True, "loss")
    assert roster.joining == (0, 2)
    assert not roster.extinct


def test_nobody_comes_into_a_founding_that_has_begun():
    roster = Roster(founders=2)
    for worker in (0, 1, 2):
        roster.ready(worker)
    assert brief(roster.lost(1)) == (2, (0,), True, "loss")
    assert roster.ready(3) is None
    assert brief(roster.entered(0, 2)) == (3, (0, 2, 3), False, "join")


def test_a_founding_that_all_founders_died_in_begins_anew():
    roster = Roster(founders=2)
    roster.ready(0)
    roster.ready(1)
    roster.lost(0)
    assert roster.lost(1) is None
    assert not roster.extinct
    assert roster.ready(2) is None
    assert brief(roster.ready(3)) == (3, (2, 3), True, "start")


def test_a_founder_may_confirm_late_that_the_founding_came_through():
    roster = Roster(founders=2)
    roster.ready(0)
    roster.ready(1)
    roster.lost(0)
    roster.entered(1, 1)
    assert roster.holders == {1}


def test_all_founders_have_the_state_when_the_first_of_them_says_so():
    roster = Roster(founders=3)
    for worker in (0, 1, 2):
        roster.ready(worker)
    roster.entered(0, 1)
    assert roster.holders == {0, 1, 2}
    assert roster.joining == (1, 2)
    assert set(roster.donors()) == {0}  # the others are not in the group yet, as far as is known
    assert brief(roster.lost(0)) == (2, (1, 2), True, "loss")
    assert not roster.extinct
    assert roster.lost(1) is not None
    roster.lost(2)
    assert roster.extinct


def test_a_founder_that_is_lost_before_the_first_of_them_confirms_has_not_got_the_state():
    roster = Roster(founders=3)
    for worker in (0, 1, 2):
        roster.ready(worker)
    roster.lost(2)
    roster.entered(0, 1)
    assert roster.holders == {0, 1}


def test_a_newcomer_is_proposed_at_once_and_the_group_is_not_disturbed():
    roster = founded(0, 1)
    assert brief(come(roster, 2)) == (2, (0, 1, 2), False, "join")
    assert roster.joining == (2,)


def test_newcomers_come_one_proposal_at_a_time():
    roster = founded(0, 1)
    come(roster, 2)
    assert come(roster, 4) is None
    assert come(roster, 3) is None
    assert roster.entered(0, 2) is None
    assert brief(roster.entered(2, 2)) == (3, (0, 1, 2, 3, 4), False, "join")


def test_nobody_is_proposed_before_all_founders_have_the_state():
    roster = Roster(founders=2)
    roster.ready(0)
    roster.ready(1)
    assert roster.ready(2) is None
    assert roster.entered(0, 1) is None
    assert brief(roster.entered(1, 1)) == (2, (0, 1, 2), False, "join")


def test_the_loss_of_a_member_regroups_the_others_urgently():
    roster = founded(0, 1, 2)
    assert brief(roster.lost(1)) == (2, (0, 2), True, "loss")
    assert roster.holders == {0, 2}


def test_the_loss_of_a_joiner_withdraws_its_proposal():
    roster = founded(0, 1)
    come(roster, 2)
    assert brief(roster.lost(2)) == (3, (0, 1), True, "loss")
    assert list(roster.waiting) == []


def test_a_loss_sends_joiners_back_to_wait_and_they_are_proposed_again():
    roster = founded(0, 1, 2)
    come(roster, 3)
    assert brief(roster.lost(1)) == (3, (0, 2), True, "loss")
    assert list(roster.waiting) == [3]
    assert brief(roster.entered(0, 3)) == (4, (0, 2, 3), False, "join")


def test_losing_a_worker_twice_changes_nothing():
    roster = founded(0, 1)
    roster.lost(1)
    assert roster.lost(1) is None
    assert roster.newest.generation == 2


def test_losing_a_worker_that_was_never_ready_changes_nothing():
    roster = founded(0, 1)
    assert roster.lost(7) is None
    assert roster.newest.generation == 1


def test_doubt_makes_the_group_anew_with_the_same_members():
    roster = founded(0, 1)
    assert brief(roster.doubt(1)) == (2, (0, 1), True, "doubt")


def test_doubt_about_a_generation_that_was_replaced_changes_nothing():
    roster = founded(0, 1, 2)
    roster.lost(2)
    assert roster.doubt(1) is None
    assert roster.newest.generation == 2


def test_doubt_in_the_founding_repeats_it_with_the_same_founders():
    roster = Roster(founders=2)
    roster.ready(0)
    roster.ready(1)
    assert brief(roster.doubt(1)) == (2, (0, 1), True, "doubt")


@pytest.mark.parametrize(("worker", "generation"), [(1, 1), (7, 1)])
def test_a_confirmation_by_an_outsider_counts_for_nothing(worker, generation):
    roster = founded(0, 1)
    roster.lost(1)
    before = set(roster.holders)
    assert roster.entered(worker, generation) is None
    assert roster.holders == before


def test_a_group_without_holders_of_the_state_is_extinct():
    roster = founded(0, 1)
    roster.lost(0)
    assert not roster.extinct
    assert roster.lost(1) is None
    assert roster.extinct
    assert roster.ready(2) is None


def test_joiners_alone_do_not_save_a_group_from_extinction():
    roster = founded(0)
    roster.ready(1)
    roster.lost(0)
    assert roster.extinct


def test_a_run_is_over_when_every_holder_has_finished():
    roster = founded(0, 1)
    roster.finished(0, 1)
    assert not roster.over
    roster.finished(1, 1)
    assert roster.over
    assert not roster.extinct


def test_a_run_is_over_if_the_last_holder_dies_after_another_has_finished():
    roster = founded(0, 1)
    roster.finished(0, 1)
    roster.lost(1)
    assert roster.over
    assert not roster.extinct


def test_a_worker_that_finished_is_no_loss_and_not_in_later_groups():
    roster = founded(0, 1, 2)
    roster.finished(0, 1)
    assert roster.lost(0) is None
    assert brief(roster.lost(1)) == (2, (2,), True, "loss")


def test_nobody_is_let_in_once_somebody_has_finished():
    roster = founded(0, 1)
    roster.finished(0, 1)
    assert roster.ready(2) is None
    assert roster.newest.generation == 1


def test_a_confirmation_from_before_a_worker_was_sent_back_to_wait_counts_for_nothing():
    roster = founded(0, 1)
    come(roster, 2)
    assert brief(roster.lost(1)) == (3, (0,), True, "loss")
    assert brief(roster.entered(0, 3)) == (4, (0, 2), False, "join")
    assert roster.entered(2, 2) is None
    assert roster.holders == {0}


def test_doubt_counts_while_a_proposal_is_open():
    roster = founded(0, 1)
    come(roster, 2)
    assert brief(roster.doubt(1)) == (3, (0, 1), True, "doubt")


def test_whoever_waits_for_a_worker_that_has_finished_is_told_to_go_on_without_it():
    roster = founded(0, 1, 2)
    assert brief(roster.lost(2)) == (2, (0, 1), True, "loss")
    assert brief(roster.finished(0, 1)) == (3, (1,), True, "end")


def test_workers_beyond_the_size_are_spares_until_somebody_is_lost():
    roster = Roster(founders=2, size=2)
    for worker in (0, 1):
        roster.ready(worker)
    for worker in (0, 1):
        roster.entered(worker, 1)
    assert roster.ready(2) is None
    assert list(roster.waiting) == [2]
    assert brief(roster.lost(0)) == (2, (1,), True, "loss")
    assert brief(roster.entered(1, 2)) == (3, (1, 2), False, "join")


def test_a_founding_takes_no_more_than_its_founders():
    roster = Roster(founders=2, size=3)
    roster.ready(4)
    assert brief(roster.ready(1)) == (1, (1, 4), True, "start")
    assert roster.ready(0) is None


def test_a_member_that_is_to_leave_is_left_out_of_a_proposal():
    roster = founded(0, 1, 2)
    assert brief(roster.leave(1)) == (2, (0, 2), False, "leave")
    assert roster.leave(1) is None
    assert not roster.settled
    roster.entered(0, 2)
    roster.entered(2, 2)
    assert roster.settled
    assert roster.left(1, 2) is None
    assert roster.holders == {0, 2}


def test_a_loss_finds_the_leaver_still_at_work():
    roster = founded(0, 1, 2)
    roster.leave(1)
    assert brief(roster.lost(2)) == (3, (0, 1), True, "loss")
    assert brief(roster.entered(0, 3)) == (4, (0,), False, "leave")


def test_whoever_waits_for_a_worker_that_has_left_is_told_to_go_on_without_it():
    roster = founded(0, 1, 2)
    roster.leave(1)
    assert brief(roster.lost(2)) == (3, (0, 1), True, "loss")
    assert brief(roster.left(1, 2)) == (4, (0,), True, "leave")


def test_a_leaver_is_not_called_back_once_somebody_has_gone_on_without_it():
    """What it has in hand is behind the others, who may have committed more since."""
    roster = founded(0, 1, 2)
    assert brief(roster.leave(0)) == (2, (1, 2), False, "leave")
    assert roster.entered(1, 2) is None
    assert brief(roster.doubt(1)) == (3, (1, 2), True, "doubt")
    assert roster.holders == {1, 2}
    roster.lost(1)
    roster.lost(2)
    assert roster.extinct


def test_a_leaver_that_was_called_back_is_sent_away_when_it_is_heard_that_it_was_left():
    roster = founded(0, 1, 2)
    roster.leave(0)
    assert brief(roster.doubt(1)) == (3, (1, 2, 0), True, "doubt")
    assert brief(roster.entered(1, 2)) == (4, (1, 2), True, "leave")
    assert roster.left(0, 4) is None


@pytest.mark.parametrize("heard", [True, False])
def test_a_leaver_does_not_go_on_alone_when_the_others_have_finished_without_it(heard):
    roster = founded(0, 1)
    roster.leave(0)
    if heard:
        roster.entered(1, 2)
    roster.doubt(1)
    assert roster.finished(1, 2) is None
    assert roster.over


def test_a_leaver_that_was_called_back_and_came_is_a_member_again():
    roster = founded(0, 1, 2)
    roster.leave(0)
    assert roster.doubt(1).members == (1, 2, 0)
    roster.entered(0, 3)
    assert brief(roster.newest) == (4, (1, 2), False, "leave")
    assert roster.entered(1, 2) is None
    assert 0 in roster.holders
    assert roster.doubt(3).members == (1, 2, 0)


def test_a_proposal_is_followed_by_another_only_when_somebody_is_in_it():
    """Who waits for more members enters one unasked, and all of them have to take the same."""
    roster = founded(0, 1, 2)
    assert brief(roster.leave(0)) == (2, (1, 2), False, "leave")
    assert roster.leave(1) is None
    assert come(roster, 7) is None
    assert brief(roster.entered(2, 2)) == (3, (2, 7), False, "join")


def test_the_last_ones_do_not_leave_before_others_have_the_state():
    roster = founded(0)
    assert roster.leave(0) is None
    assert brief(come(roster, 1)) == (2, (0, 1), False, "join")
    assert brief(roster.entered(1, 2)) == (3, (1,), False, "leave")


def test_a_newcomer_catches_up_outside_while_the_group_goes_on():
    roster = founded(0, 1)
    assert roster.ready(2) is None
    assert list(roster.watching) == [2]
    assert brief(roster.level(2)) == (2, (0, 1, 2), False, "join")
    assert list(roster.watching) == []


def test_a_joiner_that_dies_while_it_catches_up_is_noticed_by_nobody():
    roster = founded(0, 1)
    roster.ready(2)
    assert roster.lost(2) is None
    assert roster.newest.generation == 1


def test_a_joiner_that_lost_its_donors_begins_anew():
    roster = founded(0, 1)
    roster.ready(2)
    assert roster.ready(2) is None
    assert list(roster.watching) == [2]


def test_nobody_has_to_catch_up_with_a_group_that_stands_still():
    roster = founded(0, 1, size=3, min_workers=2)
    roster.ready(2)
    assert brief(roster.lost(0)) == (2, (1,), True, "loss")
    assert list(roster.watching) == []
    assert brief(roster.entered(1, 2)) == (3, (1, 2), False, "join")


def test_nobody_has_to_catch_up_with_a_group_that_stands_still_since_one_has_left():
    """It comes to no boundary, so that the joiner would wait for it, and it for the joiner."""
    roster = founded(0, 1, size=2, min_workers=2)
    assert brief(roster.leave(1)) == (2, (0,), False, "leave")
    roster.ready(2)  # some are still in the group in which there were enough
    assert list(roster.watching) == [2]
    assert brief(roster.entered(0, 2)) == (3, (0, 2), False, "join")
    assert list(roster.watching) == []


def test_a_spare_does_not_catch_up_before_it_is_needed():
    roster = Roster(founders=2, size=2)
    for worker in (0, 1):
        roster.ready(worker)
    for worker in (0, 1):
        roster.entered(worker, 1)
    roster.ready(2)
    assert (list(roster.waiting), list(roster.watching)) == ([2], [])


def test_joiners_are_sent_to_one_donor_after_the_other():
    roster = founded(0, 1, 2)
    assert [roster.donors() for _ in range(4)] == [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2)]


def test_a_leaver_that_dies_is_a_loss():
    roster = founded(0, 1)
    roster.leave(1)
    assert brief(roster.lost(1)) == (3, (0,), True, "loss")


def test_a_spare_that_is_to_leave_is_just_not_there_any_more():
    roster = Roster(founders=1, size=1)
    roster.ready(0)
    roster.entered(0, 1)
    roster.ready(1)
    assert roster.leave(1) is None
    assert list(roster.waiting) == []


class Lives(RuleBasedStateMachine):
    """Any order of occurrences; workers have ids that are never used again."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.roster = Roster(founders=2)
        self.issued = [self.roster.newest]
        self.next_worker = 0
        self.alive: list[int] = []
        self.removed: set[int] = set()
        self.parted: set[int] = set()  # let go, as those who are left say; their processes live

    @property
    def going(self) -> bool:
        return not self.roster.extinct and not self.roster.over

    def take(self, membership: Membership | None) -> None:
        if membership is None:
            return
        assert membership is self.roster.newest
        assert membership.generation > self.issued[-1].generation
        assert membership.members
        assert len(set(membership.members)) == membership.size
        assert not self.removed & set(membership.members)
        if membership.urgent and self.roster.founded:
            assert set(membership.members) <= self.roster.holders
        if not membership.urgent:
            leaving = set(self.roster.leaving)
            already = self.issued[-1].members
            stay = tuple(w for w in already if w not in leaving) or already
            assert membership.members[: len(stay)] == stay
        self.issued.append(membership)

    @precondition(lambda self: not self.going)
    @rule()
    def another_run(self):
        self.begin()

    @precondition(lambda self: self.going)
    @rule()
    def ready(self):
        self.alive.append(self.next_worker)
        self.take(self.roster.ready(self.next_worker))
        self.next_worker += 1

    @precondition(lambda self: self.roster.watching and self.going)
    @rule(data=st.data(), lonely=st.booleans())
    def level(self, data, lonely):
        worker = data.draw(st.sampled_from(list(self.roster.watching)))
        self.take((self.roster.ready if lonely else self.roster.level)(worker))

    @precondition(lambda self: self.alive and self.going)
    @rule(data=st.data())
    def entered(self, data):
        worker = data.draw(st.sampled_from(self.alive))
        generation = data.draw(st.sampled_from(self.issued)).generation
        leaving = set(self.roster.leaving)
        self.take(self.roster.entered(worker, generation))
        self.parted |= leaving - set(self.roster.leaving)

    @precondition(lambda self: self.alive and self.going)
    @rule(data=st.data())
    def lost(self, data):
        worker = data.draw(st.sampled_from(self.alive))
        self.alive.remove(worker)
        self.removed.add(worker)
        self.take(self.roster.lost(worker))

    @precondition(lambda self: self.roster.holders and self.going)
    @rule(data=st.data())
    def leave(self, data):
        self.take(self.roster.leave(data.draw(st.sampled_from(sorted(self.roster.holders)))))

    @precondition(lambda self: self.gone_soon and self.going)
    @rule(data=st.data())
    def left(self, data):
        worker = data.draw(st.sampled_from(self.gone_soon))
        self.alive.remove(worker)
        self.removed.add(worker)
        without = [m for m in self.issued if not m.urgent and worker not in m.members]
        self.take(self.roster.left(worker, data.draw(st.sampled_from(without)).generation))

    @property
    def gone_soon(self) -> list[int]:
        return [
            w
            for w in self.roster.leaving
            if any(not m.urgent and w not in m.members for m in self.issued[1:])
        ]

    @precondition(lambda self: self.roster.holders and self.going)
    @rule(data=st.data())
    def finished(self, data):
        worker = data.draw(st.sampled_from(sorted(self.roster.holders)))
        self.alive.remove(worker)
        self.removed.add(worker)
        generation = data.draw(st.sampled_from(self.issued)).generation
        leaving = set(self.roster.leaving)
        self.take(self.roster.finished(worker, generation))
        self.parted |= leaving - set(self.roster.leaving) - {worker}

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def doubt(self, data):
        generation = data.draw(st.sampled_from(self.issued)).generation
        self.take(self.roster.doubt(generation))

    @invariant()
    def everybody_is_somewhere(self):
        roster = self.roster
        assert roster.holders <= set(self.alive)
        if not self.going:
            return
        there = set(roster.newest.members) | set(roster.leaving)
        assert roster.holders <= there
        outside = set(roster.waiting) | set(roster.watching)
        assert not outside & there
        assert not self.parted & (outside | there)
        assert set(self.alive) <= outside | there | self.parted


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=100, stateful_step_count=25)


def test_a_new_controller_makes_a_generation_of_those_that_have_the_state():
    roster = Roster(founders=3)
    issued = roster.take_over(7, holders=[4, 2], waiting=[])
    assert brief(issued) == (8, (2, 4), True, "new controller")
    assert not roster.extinct
    for worker in (2, 4):
        roster.entered(worker, 8)
    assert roster.settled
    assert brief(come(roster, 9)) is not None
    assert roster.newest.members == (2, 4, 9)


def test_a_new_controller_founds_a_group_that_had_none():
    roster = Roster(founders=2)
    assert roster.take_over(3, holders=[], waiting=[1]) is None
    assert brief(roster.ready(5)) == (4, (1, 5), True, "start")


def test_a_new_controller_leaves_a_founding_to_those_who_were_at_it():
    roster = Roster(founders=3)
    issued = roster.take_over(4, holders=[], waiting=[7, 8, 9], founding=[0, 1])
    assert brief(issued) == (5, (0, 1), True, "new controller")
    assert roster.ready(10) is None  # nobody else comes in before it is known who has the State
    assert roster.entered(0, 4) is None  # that was said of another group
    roster.entered(0, 5)
    assert roster.holders == {0, 1}
    assert brief(roster.entered(1, 5)) == (6, (0, 1, 7, 8, 9, 10), False, "join")


def test_whoever_has_the_state_of_a_founding_says_so_for_all_of_them():
    roster = Roster(founders=3)
    roster.take_over(4, holders=[1], waiting=[], founding=[0, 1])
    assert roster.holders == {0, 1}
    assert roster.joining == (0,)
    roster.entered(1, 5)
    roster.ready(7)
    assert roster.level(7) is None  # 0 has to come in first, or it would go where 7 is met
    assert brief(roster.entered(0, 5)) == (6, (0, 1, 7), False, "join")


def test_the_last_one_with_the_state_is_lost_while_others_come_in():
    roster = founded(0)
    come(roster, 1)
    assert brief(roster.lost(0)) is None
    assert roster.extinct
    roster.ready(2)
    assert brief(roster.entered(1, 2)) == (3, (1,), True, "loss")  # it had been given the State
    assert brief(roster.entered(1, 3)) == (4, (1, 2), False, "join")


def test_a_member_that_finished_unseen_is_not_waited_for():
    roster = Roster(founders=2)
    roster.take_over(5, holders=[0, 1], waiting=[])
    assert brief(roster.finished(0, 5)) == (7, (1,), True, "end")


def test_a_group_that_lost_everybody_is_founded_anew_with_higher_generations():
    roster = founded(0, 1)
    roster.lost(0)
    roster.lost(1)
    assert roster.extinct
    before = roster.newest.generation
    assert roster.start_over() is None
    assert not roster.extinct
    roster.ready(2)
    issued = roster.ready(3)
    assert issued is not None
    assert issued.members == (2, 3)
    assert issued.generation > before
    assert issued.urgent


def test_one_worker_may_be_enough_to_found_a_group_anew():
    roster = founded(0, 1)
    roster.lost(0)
    roster.lost(1)
    assert roster.start_over(founders=1) is None
    assert brief(roster.ready(2)) == (3, (2,), True, "start")


def test_a_doubt_after_the_last_holder_died_does_not_bring_back_the_dead():
    roster = founded(0)
    assert roster.lost(0) is None
    assert roster.extinct
    assert roster.doubt(1) is None
    assert list(roster.waiting) == []
    roster.start_over()
    assert roster.settled  # there is no group in which anybody could be
    assert brief(roster.ready(1)) == (2, (1,), True, "start")


def test_a_roster_without_a_group_is_settled():
    roster = Roster(2)
    assert roster.settled
    for worker in (0, 1):
        roster.ready(worker)
    assert not roster.settled
    for worker in (0, 1):
        roster.entered(worker, 1)
    assert roster.settled
    for worker in (0, 1):
        roster.lost(worker)
    roster.start_over()
    assert (roster.members, roster.settled) == (set(), True)


def test_a_member_that_confirms_twice_counts_once():
    roster = Roster(2)
    for worker in (0, 1):
        roster.ready(worker)
    roster.entered(0, 1)
    roster.entered(0, 1)
    assert not roster.settled
    roster.entered(1, 1)
    assert roster.settled


def test_whoever_is_ready_founds_the_group_that_starts_over():
    roster = Roster(1)
    roster.ready(0)
    roster.entered(0, 1)
    assert roster.ready(1) is None
    roster.lost(0)
    again = roster.start_over()
    assert again is not None
    assert (again.generation, again.members) == (2, (1,))


def test_joiners_are_sent_to_all_members_in_turn():
    roster = Roster(2)
    for worker in (0, 1):
        roster.ready(worker)
    for worker in (0, 1):
        roster.entered(worker, 1)
    assert {roster.donors()[0] for _ in range(2)} == {0, 1}


def test_a_joiner_that_has_lost_its_donors_still_counts_once():
    roster = Roster(1, size=2)
    roster.ready(0)
    roster.entered(0, 1)
    for _ in range(2):
        assert roster.ready(1) is None
        assert list(roster.watching) == [1]


def test_a_leaver_that_is_gone_before_the_others_have_entered_is_forgotten():
    roster = founded(0, 1, 2)
    assert brief(roster.leave(2)) == (2, (0, 1), False, "leave")
    assert roster.left(2, 2) is None
    assert roster.leaving == []
    assert roster.lost(2) is None


@pytest.mark.parametrize("heir", [None, 9])
def test_whoever_was_on_its_way_in_waits_again_when_all_others_are_lost(heir):
    roster = founded(0)
    assert brief(come(roster, 2)) == (2, (0, 2), False, "join")
    assert roster.lost(0) is None
    if heir is None:
        assert brief(roster.start_over()) == (3, (2,), True, "start")
    else:
        assert brief(roster.start_over(heir)) == (3, (heir,), True, "shadow")
        assert brief(roster.entered(heir, 3)) == (4, (heir, 2), False, "join")


def test_a_shadow_that_was_to_leave_and_was_put_back_outside_is_gone_when_it_leaves_there():
    roster = founded(0, 1, size=2)
    roster.shadow_level(5)
    roster.ready(7)
    called = roster.leave(0)
    assert called is not None
    assert called.members == (1, 5)  # the shadow comes in where 7 would
    assert roster.leave(5) is None
    again = roster.shadow_lonely(5)
    assert again is not None
    assert 5 not in again.members
    roster.leave(5)
    assert 5 not in roster.leaving
    assert not roster.level_shadows

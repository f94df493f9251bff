"""Whose a slice is: one owner, whoever is left; nobody gives up what it has computed."""

import itertools
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.data.slice_assignment import TOLD, Assignment, Paces, shares, tellers

TIMES = st.lists(st.integers(1, 1000), min_size=1, max_size=7)
FEW = settings(max_examples=40)


def assigned(us, slices):
    members = tuple(3 * rank + 1 for rank in range(len(us)))
    return Assignment(members, shares(us, slices), tuple(us))


def latest(counts, us):
    return max(count * time for count, time in zip(counts, us, strict=True))


# ------------------------------------------------------------------ shares


def divisions(slices, workers):
    if workers == 1:
        yield (slices,)
        return
    for first in range(slices + 1):
        for rest in divisions(slices - first, workers - 1):
            yield (first, *rest)


@FEW
@given(us=st.lists(st.integers(1, 30), min_size=1, max_size=4), slices=st.integers(0, 9))
def test_no_other_division_is_through_earlier(us, slices):
    found = shares(us, slices)
    assert sum(found) == slices
    assert latest(found, us) == min(latest(c, us) for c in divisions(slices, len(us)))


def test_equals_share_evenly():
    assert shares([5, 5, 5], 8) == (3, 3, 2)
    assert shares([1, 1, 3], 14) == (6, 6, 2)
    assert shares([1, 100], 8) == (8, 0)


# ------------------------------------------------------------------ owners


@FEW
@given(us=TIMES, slices=st.integers(1, 24), data=st.data())
def test_every_slice_has_one_owner_who_is_left(us, slices, data):
    assignment = assigned(us, slices)
    alive = data.draw(st.sets(st.sampled_from(assignment.members), min_size=1))
    owners = assignment.owners(alive)
    assert len(owners) == slices
    assert set(owners) <= alive
    assert assignment.owners(assignment.members) == assignment.planned


@FEW
@given(us=TIMES, slices=st.integers(1, 24), data=st.data())
def test_whoever_has_a_slice_keeps_it_while_members_get_fewer(us, slices, data):
    assignment = assigned(us, slices)
    alive = set(assignment.members)
    before = assignment.owners(alive)
    for gone in data.draw(st.permutations(assignment.members))[:-1]:
        alive.discard(gone)
        now = Assignment(assignment.members, assignment.counts, assignment.us).owners(alive)
        for was, owner in zip(before, now, strict=True):
            assert owner == was or was == gone
        before = now


@FEW
@given(us=TIMES, slices=st.integers(1, 24), data=st.data())
def test_owners_do_not_depend_on_what_was_asked_before(us, slices, data):
    assignment = assigned(us, slices)
    asked = data.draw(st.lists(st.sets(st.sampled_from(assignment.members), min_size=1)))
    for alive in asked:
        assert assignment.owners(alive) == assigned(us, slices).owners(alive)


@FEW
@given(us=TIMES, slices=st.integers(1, 24), data=st.data())
def test_the_slices_of_one_lost_worker_are_through_as_early_as_can_be(us, slices, data):
    assignment = assigned(us, slices)
    if len(us) < 2:
        return
    lost = data.draw(st.integers(0, len(us) - 1))
    left = [m for m in assignment.members if m != assignment.members[lost]]
    counted = Counter(assignment.owners(left))
    counts, times = list(assignment.counts), list(us)
    orphans = counts.pop(lost)
    del times[lost]
    for _ in range(orphans):
        heir = min(range(len(times)), key=lambda r: (counts[r] + 1) * times[r])
        counts[heir] += 1
    found = [counted[member] for member in left]
    assert latest(found, times) == latest(counts, times)


@FEW
@given(
    us=st.lists(st.integers(1, 9), min_size=3, max_size=6),
    slices=st.integers(1, 24),
    data=st.data(),
)
def test_what_two_lost_ones_would_leave_to_each_other_comes_on_top_of_the_rest(us, slices, data):
    assignment = assigned(us, slices)
    members, planned = assignment.members, assignment.planned
    lost = data.draw(st.permutations(members))[:2]
    left = [member for member in members if member not in lost]
    expected = list(planned)
    for gone in lost:
        alone = assignment.owners([member for member in members if member != gone])
        for number, owner in enumerate(planned):
            if owner == gone:
                expected[number] = alone[number]
    load = Counter(expected)
    for number, owner in enumerate(expected):
        if owner in lost:
            first = members.index(planned[number])

            def through(heir, first=first):
                rank = members.index(heir)
                return (load[heir] + 1) * us[rank], (rank - first) % len(members)

            expected[number] = heir = min(left, key=through)
            load[heir] += 1
    assert assignment.owners(left) == tuple(expected)


@FEW
@given(workers=st.integers(2, 7), slices=st.integers(1, 48), data=st.data())
def test_equal_workers_are_left_with_nearly_equal_shares(workers, slices, data):
    """After one loss; of several in one step each may leave its heirs two slices apart."""
    assignment = assigned([1] * workers, slices)
    alive = data.draw(st.sets(st.sampled_from(assignment.members), min_size=1))
    counts = Counter(assignment.owners(alive))
    most, least = max(counts.values()), min(counts[m] for m in alive)
    lost = workers - len(alive)
    assert most - least <= (1 if lost < 2 else 2 * lost)


def test_a_stranger_computes_only_what_no_member_can():
    assignment = assigned([1, 1], 4)
    assert set(assignment.owners({assignment.members[1], 90})) == {assignment.members[1]}
    assert assignment.owners({91, 90}) == (90,) * 4


def test_a_rack_of_many_may_be_lost_at_once():
    members = tuple(range(300))
    assignment = Assignment(members, shares([1] * 300, 600), (1,) * 300)
    alive = set(members) - set(range(100, 130))
    assert set(assignment.owners(alive)) <= alive


# ------------------------------------------------------------------ speed


def run(paces, speed, steps, slices=16, members=(0, 1, 2)):
    """Steps in which `speed(worker, step)` is how long a slice takes; the shares of each."""
    history = []
    for step in range(steps):
        assignment = paces.assign(members, slices)
        history.append(assignment.counts)
        told = {
            m: speed(m, step) if count else 0
            for m, count in zip(members, assignment.counts, strict=True)
        }
        paces.agreed(assignment, {m: told[m] for m in tellers(members, step)})
    return history


def test_shares_follow_speed_and_settle():
    noise = Random(1)
    paces = Paces()

    def speed(worker, _step):
        return int((3000 if worker == 2 else 1000) * noise.uniform(0.96, 1.04))

    history = run(paces, speed, 1000)
    assert history[0] == (6, 5, 5)
    assert sum(before != after for before, after in itertools.pairwise(history)) <= 2
    us = [1000, 1000, 3000]
    ideal = 16 / sum(1 / time for time in us)
    assert all(latest(counts, us) <= 1.15 * ideal for counts in history[3:])


def test_who_got_slow_for_a_while_gets_slices_again():
    paces = Paces()
    run(paces, lambda worker, _: 90_000 if worker == 2 else 1000, 3)
    assert paces.assign((0, 1, 2), 16).counts[2] == 0
    history = run(paces, lambda *_: 1000, 600)
    assert history[-1] in ((6, 5, 5), (5, 6, 5), (5, 5, 6))


def test_a_joiner_is_taken_to_be_as_fast_as_most():
    paces = Paces()
    run(paces, lambda worker, _: 1000, 3)
    assert paces.assign((0, 1, 2, 7), 16).counts == (4, 4, 4, 4)


def test_who_has_left_and_comes_back_is_new():
    paces = Paces()
    run(paces, lambda worker, _: 90_000 if worker == 2 else 1000, 3)
    run(paces, lambda worker, _: 1000, 1, members=(0, 1))
    assert paces.assign((0, 1, 2), 15).us == (1000, 1000, 1000)


def test_shares_that_settled_hold_for_as_many_slices_only():
    paces = Paces()
    run(paces, lambda worker, _: 1000 * (1 + worker), 3)
    for slices in (16, 8, 33):
        assert sum(paces.assign((0, 1, 2), slices).counts) == slices


def test_shares_change_only_if_a_tenth_is_gained_by_it():
    def settled(counts):
        paces = Paces()
        paces.agreed(Assignment((0, 1), counts, (7, 7)), {0: 7, 1: 7})
        other = Paces()
        other.load_state_dict(paces.state_dict())
        return other.assign((0, 1), sum(counts)).counts

    assert settled((10, 8)) == (10, 8)  # a tenth, and not more
    assert settled((12, 8)) == (10, 10)
    assert settled((12, 10)) == (12, 10)


def test_of_whom_nothing_is_known_it_is_taken_to_need_an_instant():
    paces = Paces()
    assert paces.assign((0, 1), 4).us == (1, 1)
    for _ in range(3):  # nor does it ever need less
        paces.agreed(Assignment((0, 1), (4, 0), (1, 1)), {0: 5, 1: 1})
        paces.agreed(Assignment((0, 1), (4, 0), (1, 1)), {0: 5, 1: 0})
    assert paces.assign((0, 1), 4).us == (5, 1)
    paces.agreed(Assignment((0, 1), (2, 2), (5, 1)), {0: 1, 1: 7})
    assert paces.assign((0, 1), 4).us == (1, 7)


def test_who_has_no_slice_is_taken_to_get_faster_by_a_hundredth_a_step():
    paces = Paces()
    paces.agreed(Assignment((0, 1), (2, 2), (1, 1)), {0: 100, 1: 10_000})
    paces.agreed(Assignment((0, 1), (4, 0), (100, 10_000)), {0: 100, 1: 0})
    assert paces.assign((0, 1), 4).us == (100, 9_900)


def test_of_equal_heirs_it_is_the_next_in_rank_and_each_gets_one():
    equals = Assignment((0, 1, 2, 3), (2, 2, 2, 2), (1, 1, 1, 1))
    assert equals.owners({0, 2, 3}) == (0, 0, 2, 3, 2, 2, 3, 3)
    assert equals.owners({0, 1, 2}) == (0, 0, 1, 1, 2, 2, 0, 1)


def test_paces_are_part_of_the_state():
    paces, other = Paces(), Paces()
    run(paces, lambda worker, _: 1000 * (worker + 1), 5)
    other.load_state_dict(paces.state_dict())
    for members in ((0, 1, 2), (2, 0), (0, 1, 2, 5)):
        assert other.assign(members, 16) == paces.assign(members, 16)
    forgotten = Paces()
    forgotten.load_state_dict({})
    assert forgotten.assign((0, 1), 4).counts == (2, 2)


def test_of_many_workers_each_has_its_turn():
    members = tuple(range(30))
    assert tellers(members[:3], 5) == members[:3]
    assert tellers(members, 0) == members[:TOLD]
    assert tellers(members, 3) == (24, 25, 26, 27, 28, 29, 0, 1)
    assert tellers(members[:TOLD], 5) == members[:TOLD]
    told = Counter(w for step in range(30) for w in tellers(members, step))
    assert set(told.values()) == {TOLD}

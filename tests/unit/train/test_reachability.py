"""Who is taken out when workers cannot reach each other: many networks, many orders of news."""

from itertools import combinations
from random import Random

import pytest

from elastix.train.control.messages import Suspect
from elastix.train.control.reachability import Reachability, cut_off

TIMEOUT = 10.0


def play(random, members, trusted, broken, mute=(), generations=40):
    """Members try to meet, generation after generation; who is taken out, in order.

    Args:
        random: decides who says what in which order, and who says nothing this time.
        members: those of the first generation.
        trusted: those of them that train.
        broken: pairs that cannot connect.
        mute: workers whose statements never arrive.
        generations: after so many it should be over.
    """
    reachability = Reachability(TIMEOUT)
    members, now, out = set(members), 0.0, []
    for generation in range(1, generations):
        failing = [pair for pair in broken if set(pair) <= members]
        if not failing:
            reachability.settled(members)
            assert reachability.verdict(members & set(trusted), now + 1000) is None
            return out
        said = {worker: {b for a, b in edges(failing, worker)} for worker in members}
        for worker in random.sample(sorted(said), len(said)):
            if said[worker] and worker not in mute and (random.random() < 0.9):
                for _ in range(random.randint(1, 3)):  # looked at more than once
                    reachability.hear(worker, Suspect(generation, "", frozenset(said[worker])), now)
        now += random.uniform(1.0, 4.0)
        found = reachability.verdict(members & set(trusted), now)
        if found is not None:
            reachability.forget(found)
            members.discard(found)
            out.append(found)
    pytest.fail(f"no end: members {members}, broken {broken}")


def edges(pairs, worker):
    return [(worker, b if a == worker else a) for a, b in pairs if worker in (a, b)]


def test_the_one_that_is_cut_off_from_all_others_goes_and_nobody_else():
    for seed in range(200):
        random = Random(seed)
        size = random.randint(3, 8)
        bad = random.randrange(size)
        broken = [(min(bad, w), max(bad, w)) for w in range(size) if w != bad]
        mute = random.choice([(), (bad,)])  # its own statements may not get through
        assert play(random, range(size), range(size), broken, mute) == [bad]


def test_a_newcomer_that_fails_never_counts_against_those_who_train():
    for seed in range(200):
        random = Random(seed)
        size, more = random.randint(1, 6), random.randint(1, 3)
        trusted, newcomers = range(size), range(size, size + more)
        broken = [
            (worker, newcomer)
            for newcomer in newcomers
            for worker in random.sample(trusted, random.randint(1, size))
        ]
        out = play(random, range(size + more), trusted, broken, mute=random.choice([(), trusted]))
        assert sorted(out) == list(newcomers)


def test_of_a_group_that_falls_apart_the_larger_part_stays():
    for seed in range(100):
        random = Random(seed)
        few = random.randint(1, 3)
        size = random.randint(2 * few + 1, 9)
        lost = set(random.sample(range(size), few))
        broken = [(a, b) for a, b in combinations(range(size), 2) if (a in lost) != (b in lost)]
        assert set(play(random, range(size), range(size), broken)) == lost


def test_two_that_cannot_reach_each_other_cost_the_younger():
    assert play(Random(0), (3, 5), (3, 5), [(3, 5)]) == [5]


def test_whoever_reaches_no_meeting_goes_unless_nobody_who_trains_does():
    assert cut_off([(1, 1)], {0, 1, 2}) == 1
    assert cut_off([(1, 1), (0, 2)], {0, 1, 2}) == 1
    assert cut_off([(0, 0), (1, 1), (2, 2)], {0, 1, 2}) is None
    assert cut_off([(0, 0), (7, 7)], {0, 1, 2}) == 7
    assert cut_off([], {0, 1}) is None


def test_a_pair_that_failed_once_waits_for_others_and_is_not_cut_off():
    """The next meeting is late because a third is in a long step."""
    reachability = Reachability(TIMEOUT)
    reachability.hear(0, Suspect(1, "", frozenset({2})), 0.0)
    reachability.hear(2, Suspect(1, "", frozenset({0})), 0.0)
    assert reachability.verdict((0, 1, 2), 1000.0) is None
    reachability.hear(0, Suspect(2, "", frozenset({2})), 1001.0)
    assert reachability.verdict((0, 1, 2), 1001.0) == 2


def test_after_one_is_taken_out_the_others_have_as_long_again():
    reachability = Reachability(TIMEOUT)
    for generation in (1, 2):
        reachability.hear(0, Suspect(generation, "", frozenset({1, 2, 3})), float(generation))
        reachability.hear(2, Suspect(generation, "", frozenset({3})), float(generation))
    assert reachability.verdict(range(4), 20.0) == 0
    assert reachability.verdict(range(4), 25.0) is None
    reachability.hear(2, Suspect(3, "", frozenset({3})), 26.0)
    reachability.hear(2, Suspect(4, "", frozenset({3})), 28.0)
    assert reachability.verdict(range(4), 29.0) is None
    assert reachability.verdict(range(4), 31.0) == 3


def test_a_verdict_in_the_middle_of_the_news_counts_what_was_said_before():
    reachability = Reachability(TIMEOUT)
    for worker in (0, 1, 2, 3):
        reachability.hear(worker, Suspect(1, "", frozenset({1, 2, 3} if worker == 0 else {0})), 0.0)
    reachability.hear(
        3, Suspect(2, "", frozenset({0})), 20.0
    )  # the others are about to say so again
    assert reachability.verdict(range(4), 20.0) == 0


def test_what_names_nobody_takes_nobody_out():
    reachability = Reachability(TIMEOUT)
    for generation in range(1, 50):
        assert reachability.hear(0, Suspect(generation, ""), float(generation))
        assert not reachability.hear(0, Suspect(generation, ""), float(generation))
    assert reachability.verdict((0, 1), 100.0) is None


def test_what_is_said_of_the_dead_after_their_death_counts_against_nobody():
    """As when a connection to them had failed, and their death was known before that was told."""
    reachability = Reachability(TIMEOUT)
    for dead in range(10, 15):
        reachability.forget(dead)
        reachability.hear(0, Suspect(dead, "", frozenset({dead})), float(dead))
    for generation in (20, 21):
        for worker in (0, 1, 2):
            reachability.hear(worker, Suspect(generation, "", frozenset({3})), 20.0)
    assert reachability.verdict(range(4), 100.0) == 3


def fail(reachability, generations, seconds=TIMEOUT, unreachable=()):
    """Both of two members fail in each of these generations; when the last one has failed."""
    for generation in generations:
        for worker in (0, 1):
            said = f"error {generation}"
            reachability.hear(
                worker, Suspect(generation, said, frozenset(unreachable)), generation * seconds
            )
    return generation * seconds


def test_what_fails_in_group_after_group_ends_the_run_with_its_last_error():
    reachability = Reachability(TIMEOUT)
    assert reachability.in_vain(1000.0) is None
    assert reachability.in_vain(fail(reachability, range(1, 5))) is None
    now = fail(reachability, [5])
    text = str(reachability.in_vain(now))
    assert "failed in 5 groups one after the other, for 40 s" in text
    assert text.endswith("on worker 1: error 5")


def test_groups_that_fail_in_quick_succession_have_time_to_recover():
    reachability = Reachability(TIMEOUT)
    assert reachability.in_vain(fail(reachability, range(1, 25), seconds=1.0)) is None
    assert reachability.in_vain(fail(reachability, range(25, 32), seconds=1.0)) is not None


@pytest.mark.parametrize(
    "rescue", [Reachability.progress, lambda reachability: reachability.forget(7)]
)
def test_an_operation_that_ends_or_a_worker_that_goes_begins_it_anew(rescue):
    reachability = Reachability(TIMEOUT)
    fail(reachability, range(1, 5))
    rescue(reachability)
    assert reachability.in_vain(fail(reachability, range(5, 9))) is None
    assert reachability.in_vain(fail(reachability, [9])) is not None


def test_one_that_is_cut_off_is_named_before_the_run_is_given_up():
    reachability = Reachability(TIMEOUT)
    for generation in range(1, 30):
        now = fail(reachability, [generation], seconds=TIMEOUT / 4, unreachable={2})
        if reachability.verdict((0, 1, 2), now) is not None:
            break
        assert reachability.in_vain(now) is None
    assert reachability.in_vain(now + 1000 * TIMEOUT) is None


def test_being_in_one_group_clears_those_who_are_in_it_and_nobody_else():
    reachability = Reachability(TIMEOUT)
    for generation in (1, 2):
        reachability.hear(0, Suspect(generation, "", frozenset({2, 5})), 0.0)
    reachability.settled({0, 1, 2})
    assert reachability.verdict(range(6), TIMEOUT) is None  # not for longer than that yet
    assert reachability.verdict(range(5), TIMEOUT + 0.1) == 5


def test_when_one_is_taken_out_the_others_have_to_fail_anew_and_more_than_once():
    reachability = Reachability(TIMEOUT)

    def fails(generation, now, *pairs):
        for worker, other in pairs:
            reachability.hear(worker, Suspect(generation, "", frozenset({other})), now)

    for generation in (1, 2):
        fails(generation, 0.0, (0, 1), (2, 3))
    members = range(4)
    assert reachability.verdict(members, TIMEOUT + 1) == 3
    fails(3, TIMEOUT + 2, (0, 1))
    assert reachability.verdict(members, 10 * TIMEOUT) is None
    fails(4, 10 * TIMEOUT, (0, 1))
    assert reachability.verdict(members, 10 * TIMEOUT) == 1


def test_what_is_heard_before_a_suspended_conductor_knows_the_time_counts_from_then():
    reachability = Reachability(TIMEOUT)
    reachability.hear(0, Suspect(1, "", frozenset({1})), now=4000.0)
    reachability.was_away(3600.0, now=4000.2)
    reachability.hear(0, Suspect(2, "", frozenset({1})), now=4005.0)
    assert reachability.verdict({0, 1}, now=4009.0) is None
    assert reachability.verdict({0, 1}, now=4011.0) == 1

"""When it is known that places of a worker wait for each other for ever, and what is said of it."""

from dataclasses import replace

import pytest

from elastix.comm.protocol.crew import Crew, Held
from elastix.comm.protocol.standing import BATCHES, STILL_S, Standing, deserted, parted

WAITS = Standing(
    position=6,
    before={"shard": 20, BATCHES: 2},
    now={"shard": 20, BATCHES: 2},
    still_s=STILL_S,
    busy=False,
    where="line 10 of train.py",
)
"""It has come to the call at 6."""

COMPUTES = replace(WAITS, position=5, before={"shard": 14, BATCHES: 2}, where="line 14 of train.py")
"""It is on its way there, and has begun as much."""


def more(stands, **counted):
    return replace(stands, now={**stands.now, **counted})


def test_a_place_that_has_begun_more_before_a_call_than_another_had_there_has_parted():
    error = parted(3, {0: WAITS, 1: more(COMPUTES, shard=21)})
    assert "of worker 3 have parted" in str(error)
    said = "place 1, now at line 14 of train.py, has begun 21 collectives along shard"
    assert said in str(error)
    assert "place 0, now at line 10 of train.py, had begun 20" in str(error)


@pytest.mark.parametrize("places", [(0, 1), (1, 0), (2, 3)])
def test_it_is_found_whichever_places_these_are(places):
    waits, computes = places
    stands = {waits: WAITS, computes: more(COMPUTES, shard=21)}
    assert f"place {computes}, now at line 14 of train.py, has begun 21" in str(parted(0, stands))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(COMPUTES, id="it is on its way"),
        pytest.param(WAITS, id="it has come there as well"),
        pytest.param(more(WAITS, shard=21), id="what is computed within the call counts later"),
        pytest.param(
            replace(more(COMPUTES, shard=25), position=7, before={"shard": 22}), id="it is ahead"
        ),
        pytest.param(more(replace(COMPUTES, busy=True), shard=21), id="it may go on by itself"),
        pytest.param(
            more(replace(COMPUTES, still_s=STILL_S - 0.1), shard=21), id="it has just moved"
        ),
        pytest.param(more(COMPUTES, **{"tensor, shard=1": 9}), id="of another group"),
    ],
)
def test_nothing_is_wrong_as_far_as_is_known(other):
    assert parted(0, {0: WAITS, 1: other}) is None
    assert parted(0, {0: other, 1: WAITS}) is None


def test_two_that_have_come_to_one_call_had_begun_the_same():
    before = {"shard": 23, BATCHES: 2}
    error = parted(0, {0: WAITS, 1: replace(WAITS, before=before)})
    assert "place 1, now at line 10 of train.py, has begun 23 collectives along shard" in str(error)


def test_a_place_that_has_skipped_a_batch_has_parted():
    skipped = replace(WAITS, position=7)
    error = parted(0, {0: skipped, 1: more(WAITS, batches=3)})
    assert "place 1, now at line 10 of train.py, has begun 3 batches" in str(error)


IN_SCHEDULE = replace(COMPUTES, scheduled=True)
THROUGH = replace(WAITS, inside=True)


@pytest.mark.parametrize(
    "others",
    [{1: THROUGH, 2: THROUGH}, {1: IN_SCHEDULE, 2: THROUGH}, {1: IN_SCHEDULE, 2: IN_SCHEDULE}],
)
def test_stages_that_wait_for_each_other_and_for_those_who_are_through_have_parted(others):
    error = str(deserted(3, {0: IN_SCHEDULE, **others}))
    assert "of worker 3 have parted, and wait for each other: place 0, now at line 14" in error
    assert ("place 2, now at line 10" in error) == (others[2] is THROUGH)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(COMPUTES, id="it computes, and sends then"),
        pytest.param(WAITS, id="it is out of that call again"),
        pytest.param(replace(THROUGH, position=5), id="it has come no further"),
        pytest.param(replace(THROUGH, still_s=STILL_S - 0.1), id="it was seen to move"),
        pytest.param(replace(IN_SCHEDULE, still_s=STILL_S - 0.1), id="it has waited for less"),
    ],
)
def test_stages_that_may_still_be_sent_something_have_not(other):
    assert deserted(0, {0: IN_SCHEDULE, 1: THROUGH, 2: other}) is None
    assert deserted(0, {0: THROUGH, 1: THROUGH, 2: THROUGH}) is None


def test_a_speaker_wants_to_have_heard_of_all_stages_of_late():
    crew = Crew(3)
    crew.hear(1, THROUGH)
    assert crew.parted(0, IN_SCHEDULE) is None
    crew.hear(1, THROUGH)
    crew.hear(2, IN_SCHEDULE)
    assert "have parted" in str(crew.parted(0, IN_SCHEDULE))
    assert crew.parted(0, None) is None
    assert crew.parted(0, IN_SCHEDULE) is None  # what it has heard is of three looks ago
    crew.hear(1, THROUGH)
    crew.hear(2, IN_SCHEDULE)
    assert crew.parted(0, IN_SCHEDULE) is not None


def test_a_speaker_compares_with_who_has_not_moved_since_it_said_so():
    crew = Crew(3)
    assert crew.parted(0, more(COMPUTES, shard=21)) is None
    crew.hear(2, WAITS)
    assert crew.parted(0, None) is None  # it moves itself
    assert "place 0, now at line 14 of train.py, has begun 21" in str(
        crew.parted(0, more(COMPUTES, shard=21))
    )
    crew.hear(2, Held(2, 1, 1))
    assert crew.parted(0, more(COMPUTES, shard=21)) is None

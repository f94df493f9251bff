"""What is replayed, from events alone."""

from elastix.events import (
    BatchShares,
    GenerationFormed,
    LoaderOpened,
    Resumed,
    SamplesLeftOut,
    StateStored,
    StepCommitted,
)
from elastix.testing.replayed_steps import (
    last_stored,
    left_out,
    standing,
    steps_of,
    weights,
    whole_step,
)


def committed(step, generation=1, **shares):
    batch = BatchShares(
        loader=0, epoch=0, shares={int(name[1:]): spans for name, spans in shares.items()}
    )
    return StepCommitted(step=step, generation=generation, world_size=2, batches=(batch,))


def opened(slices=0):
    return LoaderOpened(loader=0, length=100, seed=0, shuffle=True, batch_size=10, slices=slices)


FORMED = [
    GenerationFormed(generation=1, members=(0, 1, 2), cause="start"),
    GenerationFormed(generation=2, members=(0, 2), cause="loss"),
]
FIRST = committed(1, w0=((0, 5),), w1=((5, 10),))
SECOND = committed(2, w0=((10, 15),), w1=((15, 20),))
AGAIN = committed(2, generation=2, w2=((10, 20),))


def test_steps_that_a_restart_went_back_behind_do_not_stand():
    assert standing([FIRST, SECOND, Resumed(step=1, ref=""), AGAIN]) == [FIRST, AGAIN]
    assert standing([FIRST, SECOND]) == [FIRST, SECOND]


def stored(step):
    return StateStored(
        ref=f"{step:064}", step=step, reason="every_steps", stored_bytes=1, store_s=0.1
    )


def test_a_state_that_a_restart_went_back_behind_is_not_the_last_one():
    first, second = stored(1), stored(2)
    assert last_stored([FIRST]) is None
    assert last_stored([FIRST, first, SECOND, second, AGAIN]) == second
    assert last_stored([FIRST, first, SECOND, second, Resumed(step=1, ref=""), AGAIN]) == first


def test_each_is_taken_by_those_who_had_samples_beside_all_who_agreed():
    events = [*FORMED, opened(), FIRST, SECOND, Resumed(step=1, ref=""), AGAIN]
    found = steps_of(standing(events), events)
    assert [each.committed for each in found] == [FIRST, AGAIN]
    assert [each.workers for each in found] == [(0, 1), (2,)]
    assert [each.present for each in found] == [{0, 1, 2}, {0, 2}]


def test_a_step_in_slices_is_that_of_one_worker():
    events = [*FORMED, opened(slices=4), FIRST]
    (found,) = steps_of([FIRST], events)
    assert found == whole_step(found)
    assert found.workers == (0,)
    assert found.present is None
    assert found.committed.batches[0].shares == {0: ((0, 10),)}


def test_shares_weigh_as_many_samples_or_all_the_same():
    (batch,) = committed(1, w0=((0, 2), (4, 5)), w3=((2, 4),)).batches
    assert weights(batch) == {0: 3, 3: 2}
    assert weights(batch, len) == {0: 2, 3: 1}
    assert weights(BatchShares(loader=0, epoch=0, shares={0: ((0, 2),)}, whole=(1, 2))) == {
        1: 1,
        2: 1,
    }


def test_what_is_left_out_is_known_with_the_step_after_which_it_was_said():
    said = SamplesLeftOut(loader=0, spans=((3, 4),))
    assert left_out([said, FIRST, said, Resumed(step=7, ref=""), said]) == {
        0: [(0, said.spans), (1, said.spans), (7, said.spans)]
    }

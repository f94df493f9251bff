"""What digests of replicas say: who differs, in what, since when; and what counts as a State."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastix.data.random_numbers import RandomState
from elastix.errors import ReplicasDiffer, TrainError
from elastix.event_records import from_record, to_record
from elastix.events import ReplicasCompared
from elastix.state import State, capture
from elastix.train.checkpoint import state_digests
from elastix.train.checkpoint.assembly import CheckpointId
from elastix.train.checkpoint.comparison import Comparisons, compare, compare_kinds, fault

A = {"model": "a", "optimizer": "b"}
B = {"model": "a", "optimizer": "c"}
C = {"model": "x", "optimizer": "c"}


def test_workers_that_hold_the_same_are_equal():
    found = compare(7, "final", {0: A, 2: dict(A), 5: A})
    assert found.equal
    assert (found.step, found.occasion, found.workers) == (7, "final", (0, 2, 5))
    assert found.digest == state_digests.whole(A)
    assert (found.apart, found.parts) == ((), ())


def of_a_stage(name, lr, steps):
    layer = nn.ModuleDict({name: nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    optimizer.state["steps"] = steps  # of no parameter
    state = capture({"": layer}, {"optimizer": optimizer})
    return state_digests.entries(state, state_digests.manifests(state))


@pytest.mark.parametrize(
    ("lr", "steps", "says"),
    [(0.1, 7, None), (0.2, 7, "@optimizer"), (0.1, 8, "@optimizer")],
)
def test_stages_have_other_parameters_in_an_optimizer_and_the_same_options(lr, steps, says):
    found = Comparisons()
    found.hold_entries(CheckpointId(3), 0, of_a_stage("a", 0.1, 7), 2)
    found.hold_entries(CheckpointId(3), 0, of_a_stage("b", lr, steps), 2)
    parted = found.parted(CheckpointId(3))
    assert (parted is None) if says is None else (says in str(parted))


@pytest.mark.parametrize(
    ("held", "donors", "apart"),
    [
        ({0: B, 1: A, 3: B}, {3: 0}, (0, 1, 3)),  # two hold what one of them had, it may be wrongly
        ({0: B, 1: A, 2: A, 3: B}, {3: 0}, (0, 3)),
        ({0: B, 1: A, 3: A}, {3: 0}, (0,)),  # it has changed since it gave that
        ({0: B, 3: A, 4: A}, {3: 0, 4: 0}, (0,)),
        ({0: B, 3: B, 4: A}, {3: 0, 4: 0}, (0, 3, 4)),
        ({1: A, 3: B, 4: B}, {3: 0, 4: 0}, (1, 3, 4)),  # their donor is lost
        ({0: B, 1: A, 3: B}, {}, (1,)),
    ],
)
def test_who_was_given_a_state_adds_nothing_to_what_its_donor_holds(held, donors, apart):
    assert compare(7, "step", held, donors).apart == apart
    of_kinds = {worker: (0, parts) for worker, parts in held.items()}
    assert compare_kinds(7, "step", of_kinds, donors).apart == apart


def test_the_minority_is_named_with_what_it_holds_otherwise():
    found = compare(7, "final", {0: A, 1: B, 2: A})
    assert not found.equal
    assert (found.apart, found.parts, found.digest) == (
        (1,),
        ("optimizer",),
        state_digests.whole(A),
    )
    text = str(fault(found, 4))
    assert "after step 7 worker 1 holds another State than workers 0 and 2" in text
    assert "what differs: optimizer" in text
    assert "equal when last compared, after step 4" in text


@pytest.mark.parametrize("held", [{0: A, 1: B}, {0: A, 1: A, 2: B, 3: B}, {0: A, 1: B, 2: C}])
def test_without_a_majority_all_are_named(held):
    found = compare(7, "final", held)
    assert found.apart == tuple(held)
    assert found.digest == ""
    assert "hold different States" in str(fault(found, None))


def test_a_part_that_one_of_them_lacks_is_a_difference():
    found = compare(3, "join", {0: A, 1: A, 2: {**A, "average": "d"}})
    assert (found.apart, found.parts) == ((2,), ("average",))


def test_workers_are_compared_with_those_whose_processors_are_of_their_kind():
    alike = compare_kinds(7, "step", {0: (1, A), 1: (2, B), 2: (1, A), 3: (2, B)})
    assert alike.equal
    assert alike.workers == (0, 1, 2, 3)
    apart = compare_kinds(7, "step", {0: (1, A), 1: (2, B), 2: (1, A), 3: (2, C), 4: (1, C)})
    assert (apart.apart, apart.parts) == ((1, 3, 4), ("model", "optimizer"))
    assert compare_kinds(7, "step", {0: (1, A), 1: (2, B)}) is None


def test_what_is_stored_may_differ_between_kinds_of_processors():
    comparisons, mark = Comparisons(), CheckpointId(7)
    for worker, (kind, parts) in enumerate([(1, A), (2, B), (1, A)]):
        comparisons.hold(mark, worker, parts, processor=kind)
    assert comparisons.settle(mark, "final").equal
    comparisons.hold(mark, 3, A, processor=2)
    assert not comparisons.settle(mark, "final").equal
    comparisons.hold(mark, 4, C, processor=1)
    assert comparisons.settle(mark, "final").apart == (1, 3, 4), "those of both kinds"


def test_a_process_of_a_crew_that_comes_late_and_differs_is_news():
    comparisons, mark = Comparisons(), CheckpointId(7)
    for worker in (0, 1):
        comparisons.hold(mark, worker, A, place=0)
    assert comparisons.settle(mark, "final").equal
    comparisons.hold(mark, 0, A, place=1)
    assert comparisons.settle(mark, "final") is None
    comparisons.hold(mark, 1, B, place=1)
    assert comparisons.settle(mark, "final").apart == (0, 1)


@pytest.mark.parametrize("held", [{}, {3: A}])
def test_one_worker_has_nothing_to_compare(held):
    assert compare(7, "final", held) is None


@given(st.dictionaries(st.integers(0, 30), st.sampled_from([A, B, C]), min_size=2))
def test_nobody_of_the_majority_is_ever_blamed_and_no_difference_passes(held):
    found = compare(1, "final", held)
    assert found.equal == (len({state_digests.whole(parts) for parts in held.values()}) == 1)
    kept = [held[worker] for worker in held if worker not in found.apart]
    assert all(parts == kept[0] for parts in kept)
    assert not kept or 2 * len(kept) > len(held)
    assert from_record(to_record(found)) == found


def test_a_late_comer_is_compared_with_those_who_were_in_time():
    comparisons = Comparisons()
    mark = CheckpointId(5, order=2)
    comparisons.hold(mark, 0, A)
    assert comparisons.settle(mark, "final") is None
    comparisons.hold(mark, 1, A)
    assert comparisons.settle(mark, "final").workers == (0, 1)
    assert comparisons.settle(mark, "final") is None  # told already
    assert comparisons.equal_step == 5
    comparisons.hold(mark, 2, B)
    assert comparisons.settle(mark, "final").apart == (2,)


def test_those_who_begin_anew_are_not_compared_with_the_dead():
    comparisons = Comparisons()
    comparisons.hold(CheckpointId(5), 0, A)
    comparisons.forget()
    comparisons.hold(CheckpointId(5), 3, B)
    assert comparisons.settle(CheckpointId(5), "every_steps") is None


def test_the_error_ends_a_run_and_travels_between_processes():
    error = fault(compare(7, "final", {0: A, 1: B}), 4)
    assert isinstance(error, TrainError)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ReplicasDiffer)
    assert str(again) == str(error)


# ------------------------------------------------------------------ what is digested


class Tracked:
    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


@pytest.fixture
def parts():
    """A function from a change of live objects to the digests of their State."""

    def digests(change=lambda *_: None):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        tracked = Tracked({"count": 3, "mean": torch.zeros(2)})
        counts = {"step": 5, "serial": 9, "reports": 2, "stored_step": 0}
        others = {"optimizer": optimizer, "scheduler": scheduler, "mine": tracked}
        change(model, optimizer, scheduler, tracked, counts)
        state = capture({"": model}, {**others, "rng": RandomState()}, counts)
        return state_digests.digests(state)

    return digests


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8).numpy()[1] ^= 4


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", lambda model, *_: flip(model[0].weight)),
        ("model", lambda model, *_: flip(model[1].running_var)),
        ("model", lambda model, *_: flip(model[1].num_batches_tracked)),
        ("optimizer", lambda m, optimizer, *_: flip(optimizer.state[m[0].bias]["exp_avg_sq"])),
        ("optimizer", lambda m, optimizer, *_: optimizer.param_groups[0].update(lr=0.2)),
        ("scheduler", lambda m, o, scheduler, *_: setattr(scheduler, "last_epoch", 1)),
        ("mine", lambda m, o, s, tracked, c: flip(tracked.values["mean"])),
        ("mine", lambda m, o, s, tracked, c: tracked.values.update(count=4)),
        ("step", lambda m, o, s, t, counts: counts.update(step=6)),
    ],
)
def test_each_bit_of_what_replicas_share_counts(parts, part, change):
    before, after = parts(), parts(change)
    assert [name for name in before if before[name] != after[name]] == [part]


def test_random_numbers_and_bookkeeping_do_not_count(parts):
    def differ(model, optimizer, scheduler, tracked, counts):
        torch.manual_seed(99)
        counts.update(sequence=1, reports=0, stored_step=4)

    assert parts(differ) == parts()


def test_the_cursor_of_a_loader_counts():
    one, other = (
        state_digests.digests(State({}, {"@loader/0": {"position": position}}))
        for position in (8, 16)
    )
    assert one["loader"] != other["loader"]
    assert isinstance(compare(1, "final", {0: one, 1: other}), ReplicasCompared)


def test_processes_of_crews_are_compared_with_those_at_their_place():
    comparisons = Comparisons()
    mark = CheckpointId(3)
    for process, (place, parts) in enumerate([(0, A), (1, B), (0, A), (1, B)]):
        comparisons.hold(mark, process, parts, place)
    found = comparisons.settle(mark, "final")
    assert found.equal
    assert found.workers == (0, 1, 2, 3)
    assert comparisons.settle(mark, "final") is None
    other = CheckpointId(4)
    for process, (place, parts) in enumerate([(0, A), (1, B), (0, A), (1, C)]):
        comparisons.hold(other, process, parts, place)
    found = comparisons.settle(other, "final")
    assert (found.workers, found.apart, found.parts) == ((1, 3), (1, 3), ("model",))
    assert comparisons.equal_step == 3


def test_the_digest_of_several_places_is_no_sum_of_them():
    """Two places that have changed parts are two other States."""
    told = []
    for order in ((A, B), (B, A)):
        comparisons = Comparisons()
        for process in range(4):
            comparisons.hold(CheckpointId(1), process, order[process % 2], process % 2)
        told.append(comparisons.settle(CheckpointId(1), "final").digest)
    assert told[0] != told[1]

"""audit(): finds what was repeated, missing or lost, and only that."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastix.data.audit import audit
from elastix.data.cursor import Cursor, split
from elastix.errors import Corrupt
from elastix.event_records import from_record, to_record
from elastix.events import (
    BatchShares,
    LoaderOpened,
    ReplicasCompared,
    ReplicasDiverged,
    Resumed,
    RunStarted,
    SamplesLeftOut,
    StateStored,
    StepCommitted,
)


def opened(loader: int = 0, length: int = 20, seed: int = 0) -> LoaderOpened:
    return LoaderOpened(loader=loader, length=length, batch_size=4, shuffle=True, seed=seed)


def commit(step: int, *spans, loader: int = 0) -> StepCommitted:
    shares = {worker: (span,) for worker, span in enumerate(spans)}
    batch = BatchShares(loader=loader, epoch=0, shares=shares)
    return StepCommitted(step=step, generation=1, world_size=len(spans), batches=(batch,))


def run(length: int, epochs: int, batch_size: int, worlds: list[int], losses: list[bool]) -> list:
    """Events of a run whose world sizes and losses come from the two lists, over and over."""
    events: list = [opened(length=length)]
    cursor, step = Cursor(length), 0
    for epoch in range(epochs):
        while (drawn := cursor.draw(batch_size, epoch))[0]:
            batch, cursor = drawn
            world = worlds[step % len(worlds)]
            shares = dict(enumerate(split(batch, world, batch_size)))
            owed = ()
            if world > 1 and losses[step % len(losses)] and step < 3 * len(losses):
                owed = shares.pop(0)
                cursor = cursor.give_back(owed)
            step += 1
            kept = {worker: share for worker, share in shares.items() if share}
            entry = BatchShares(loader=0, epoch=0, shares=kept, owed=owed)
            events.append(
                StepCommitted(step=step, generation=1, world_size=world, batches=(entry,))
            )
    return events


runs = st.builds(
    run,
    length=st.integers(4, 60),
    epochs=st.integers(1, 3),
    batch_size=st.integers(3, 12),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    losses=st.lists(st.booleans(), min_size=1, max_size=6),
)


@given(runs)
def test_a_run_with_losses_and_resizes_is_exact(events):
    account = audit(events)
    assert account.exact, str(account)
    assert account.steps == len(events) - 1
    (loader,) = account.loaders
    assert loader.samples == loader.epochs * loader.length
    assert str(account).startswith("samples exact: ")


@given(runs, st.data())
def test_a_dropped_commit_is_a_lost_step_with_missing_samples(events, data):
    place = data.draw(st.integers(1, len(events) - 1))
    dropped = events[place]
    used = sum(b - a for share in dropped.batches[0].shares.values() for a, b in share)
    account = audit(events[:place] + events[place + 1 :])
    if place < len(events) - 1:
        assert account.steps_lost == 1
        assert not account.exact
    whole = audit(events).loaders[0].samples
    assert account.loaders[0].samples == whole - used


@given(runs, st.data())
def test_a_repeated_commit_is_seen(events, data):
    place = data.draw(st.integers(1, len(events) - 1))
    account = audit([*events, events[place]])
    assert not account.exact
    assert account.steps_lost == 1
    if events[place].batches[0].shares:
        assert account.loaders[0].repeated
        assert str(account).startswith("samples NOT EXACT")


@given(runs, st.data(), st.sampled_from([-1, 1]))
def test_a_shifted_span_is_seen(events, data, shift):
    place = data.draw(st.integers(1, len(events) - 1))
    event = events[place]
    shares = dict(event.batches[0].shares)
    if not shares:
        return
    worker = data.draw(st.sampled_from(sorted(shares)))
    shares[worker] = tuple((a + shift, b + shift) for a, b in shares[worker])
    moved = StepCommitted(
        step=event.step,
        generation=1,
        world_size=1,
        batches=(BatchShares(loader=0, epoch=0, shares=shares),),
    )
    assert not audit([*events[:place], moved, *events[place + 1 :]]).exact


def test_repeated_and_missing_samples_are_told_apart():
    account = audit([opened(), commit(1, (0, 4)), commit(2, (2, 6)), commit(3, (10, 20))])
    (loader,) = account.loaders
    assert loader.repeated == ((2, 4),)
    assert loader.missing == ((6, 10),)
    assert loader.samples == 16
    assert loader.epochs == 0
    assert account.steps_lost == 0
    assert "2 repeated, 4 missing" in str(account)


def test_steps_below_the_last_that_nobody_committed_are_lost():
    account = audit([opened(), commit(1, (0, 4)), commit(4, (4, 20))])
    assert (account.steps, account.steps_lost) == (2, 2)
    assert not account.exact


def test_a_restart_voids_the_steps_after_its_state():
    events = [opened(), commit(1, (0, 8)), commit(2, (8, 16)), Resumed(step=1, ref="")]
    assert audit(events).loaders[0].samples == 8
    assert audit(events).steps == 1
    again = audit([*events, opened(), commit(2, (8, 12), (12, 20))])
    assert again.exact
    assert again.loaders[0].epochs == 1


def test_a_restart_from_nothing_voids_all():
    events = [opened(), commit(1, (0, 8)), Resumed(step=0, ref=""), commit(1, (0, 20))]
    assert audit(events).exact


def test_loaders_are_counted_apart():
    account = audit(
        [opened(0), opened(1, length=5), commit(1, (0, 20)), commit(2, (0, 5), loader=1)]
    )
    assert [loader.epochs for loader in account.loaders] == [1, 1]
    assert account.exact


def test_samples_of_an_unknown_loader_are_corrupt():
    with pytest.raises(Corrupt, match=r"step 1 .*unknown loader 3"):
        audit([commit(1, (0, 4), loader=3)])
    with pytest.raises(Corrupt, match="left out of unknown loader 3"):
        audit([SamplesLeftOut(loader=3, spans=((0, 4),))])


def test_a_run_without_a_step_is_exact():
    account = audit([opened()])
    assert account.exact
    assert (account.steps, account.loaders[0].samples) == (0, 0)


@given(
    length=st.integers(4, 60),
    epochs=st.integers(1, 3),
    one=st.tuples(st.lists(st.integers(1, 4), min_size=1), st.lists(st.booleans(), min_size=1)),
    other=st.tuples(st.lists(st.integers(1, 4), min_size=1), st.lists(st.booleans(), min_size=1)),
)
def test_the_digest_depends_on_the_samples_and_not_on_what_happened(length, epochs, one, other):
    digest = audit(run(length, epochs, 6, *one)).digest
    assert audit(run(length, epochs, 5, *other)).digest == digest
    assert audit(run(length, epochs + 1, 6, *one)).digest != digest
    assert audit(run(length + 1, epochs, 6, *one)).digest != digest


def test_the_digest_differs_by_seed():
    events = [commit(1, (0, 20))]
    assert audit([opened(seed=1), *events]).digest != audit([opened(seed=2), *events]).digest


def test_a_batch_that_several_had_whole_counts_once():
    batch = BatchShares(loader=0, epoch=0, shares={0: ((0, 20),)}, whole=(0, 1, 2))
    step = StepCommitted(step=1, generation=1, world_size=3, batches=(batch,))
    account = audit([opened(), from_record(json.loads(json.dumps(to_record(step))))])
    assert account.exact
    assert account.loaders[0].samples == 20


def test_of_an_exact_run_it_says_the_digest_of_the_state_stored_last():
    def stored(step, digest):
        return StateStored(
            ref="r", step=step, reason="", stored_bytes=0, store_s=0.0, digest=digest
        )

    events = [opened(), commit(1, (0, 4))]
    assert "bytes" not in audit([*events, stored(1, "")]).lines
    lines = audit([*events, stored(1, "a" * 64), stored(2, "b" * 64)]).lines
    assert lines["bytes"] == f"{'b' * 12} after step 2, whatever happened on the way"

    def with_fault(cure, part):
        apart = {"workers": (0, 1, 2), "apart": (1,), "parts": (part,)}
        found = ReplicasDiverged(step=1, cure=cure, **apart)
        return audit([*events, found, stored(2, "b" * 64)]).lines

    assert with_fault("went back", "model") == lines
    assert with_fault("went back", "gradients") == lines
    assert with_fault("evicted", "model") == lines  # else all would have gone back
    said = with_fault("evicted", "gradients")["bytes"]
    assert said.startswith(f"{'b' * 12} after step 2. In step 2 a worker was found that computed")


@pytest.mark.parametrize(
    ("watched", "said"),
    [
        ((True,), "not compared as a whole: of what 2 workers held, the sentinel compared a part"),
        ((False,), "NOT COMPARED: there were 2 workers, and nothing shows them equal"),
        ((True, False), "NOT COMPARED"),
    ],
)
def test_replicas_that_only_the_sentinel_compared(watched, said):
    fits = [
        RunStarted(name="r", seed=0, config={}, scaling={}, versions={}, sentinel=sentinel)
        for sentinel in watched
    ]
    account = audit([*fits, opened(), commit(1, (0, 2), (2, 4))])
    assert str(account.replicas).startswith(said)
    assert account.replicas.equal is None


def test_workers_that_differed_at_the_very_step_that_all_go_back_to_differ_no_more():
    """A State of the last step was stored, and a bit flipped before the final one was."""
    apart = ReplicasCompared(
        step=1, occasion="final", workers=(0, 1), digest="", apart=(0, 1), parts=("model",)
    )
    events = [opened(), commit(1, (0, 2), (2, 4)), apart]
    assert audit(events).replicas.equal is False
    assert audit([*events, Resumed(step=1, ref="r")]).replicas.equal is None
    equal = ReplicasCompared(step=1, occasion="final", workers=(2, 3), digest="d")
    assert audit([*events, Resumed(step=1, ref="r"), equal]).replicas.equal
    assert audit([*events, equal]).replicas.equal is False
    assert audit([*events[:2], equal, Resumed(step=1, ref="r")]).replicas.equal


def test_a_run_in_the_place_of_another_accounts_for_its_own():
    begun = LoaderOpened(
        loader=0,
        length=8,
        batch_size=4,
        shuffle=False,
        seed=0,
        before=((0, 4), (6, 8)),
        begun=2,
    )
    steps = [commit(3, (4, 6), (8, 10)), commit(4, (10, 14))]
    found = audit([begun, *steps])
    assert found.exact
    assert (found.steps, found.loaders[0].samples, found.loaders[0].epochs) == (2, 8, 1)
    assert audit([begun, steps[1]]).steps_lost == 1
    assert audit([begun, commit(3, (8, 10))]).loaders[0].missing == ((4, 6),)
    assert audit([begun, commit(3, (2, 6))]).loaders[0].repeated == ((2, 4),)


def naive(events: list) -> tuple:
    """Step by step and position by position: steps, steps lost, samples, repeated, missing."""
    steps, used = [], []
    for event in events:
        if isinstance(event, Resumed):
            steps = [step for step in steps if step <= event.step]
            used = [(step, position) for step, position in used if step <= event.step]
        elif isinstance(event, StepCommitted):
            steps.append(event.step)
            spans = [span for share in event.batches[0].shares.values() for span in share]
            used += [(event.step, position) for span in spans for position in range(*span)]
    times = Counter(position for _, position in used)
    lost = max(steps, default=0) - len(set(steps)) + len(steps) - len(set(steps))
    missing = {p for p in range(max(times, default=0)) if p not in times}
    repeated = {p for p, n in times.items() if n > 1}
    return len(set(steps)), lost, len(times), repeated, missing


@st.composite
def histories(draw: st.DrawFn) -> list:
    """Steps that mostly follow each other, with breaks of every kind, and restarts."""
    events: list = [opened()]
    step = position = 0
    for _ in range(draw(st.integers(0, 30))):
        kind = draw(st.sampled_from(["next"] * 6 + ["back", "again", "skip", "two"]))
        if kind == "back":
            step = draw(st.integers(0, step))
            position = draw(st.integers(0, position))
            events.append(Resumed(step=step, ref=""))
            continue
        step += {"again": 0, "skip": 2}.get(kind, 1)
        position += draw(st.integers(-3, 3)) if kind == "skip" else 0
        start, size = max(0, position), draw(st.sampled_from([4, 4, 4, 2]))
        spans = [(start, start + size)]
        if kind == "two":
            spans.append((start + size + 1, start + 2 * size))
        events.append(commit(max(1, step), *spans))
        position = spans[-1][1]
    return events


@given(histories())
def test_it_counts_as_one_who_looks_at_every_position(events: list):
    account = audit(events)
    steps, lost, samples, repeated, missing = naive(events)
    (loader,) = account.loaders
    assert (account.steps, account.steps_lost, loader.samples) == (steps, lost, samples)
    assert {p for span in loader.repeated for p in range(*span)} == repeated
    assert {p for span in loader.missing for p in range(*span)} == missing


def test_batches_without_a_pass_of_their_own_are_told_of():
    """Whoever skips batches has drawn them; whether two were used together nobody knows."""
    over = BatchShares(loader=0, epoch=0, shares={0: ((0, 2),), 1: ((2, 4),)}, passed=False)
    used = BatchShares(loader=0, epoch=0, shares={0: ((4, 6),), 1: ((6, 8),)})
    step = StepCommitted(step=1, generation=1, world_size=2, batches=(over, used))
    assert from_record(json.loads(json.dumps(to_record(step)))) == step
    assert "passed" not in to_record(step)["batches"][1]
    found = audit([opened(length=8), step, commit(2, (8, 10), (10, 12))])
    assert found.exact
    assert found.loaders[0].passed_over == 4
    assert "0 missing, 4 without a backward pass of their own (left out, or used" in str(found)
    gone_back = Resumed(step=0, ref="f" * 64)
    assert audit([opened(length=8), step, gone_back]).loaders[0].passed_over == 0
    assert "without" not in str(audit([opened(), commit(1, (0, 4))]))


def test_its_memory_does_not_grow_with_the_steps():
    """It held every step and its spans: gigabytes after ten million."""

    def events(steps: int) -> Iterator:
        """A loader in each step, drawn from twice, and another in every other one."""
        yield opened(length=4 * steps)
        yield opened(loader=1, length=2 * steps)
        for step in range(steps):
            spans = [(4 * step + part, 4 * step + part + 1) for part in range(4)]
            first, second = (
                BatchShares(loader=0, epoch=0, shares={0: (a,), 1: (b,)})
                for a, b in (spans[:2], spans[2:])
            )
            batches = [first, second]
            if step % 2:
                other = (2 * step - 2, 2 * step + 2)
                batches.append(BatchShares(loader=1, epoch=0, shares={0: (other,)}))
            yield StepCommitted(step=step + 1, generation=1, world_size=2, batches=tuple(batches))

    def peak(steps: int) -> int:
        tracemalloc.start()
        try:
            assert audit(events(steps)).exact
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)
    assert peak(5_000) < 2 * peak(500)

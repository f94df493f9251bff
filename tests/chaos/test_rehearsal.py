"""Rehearsal on real processes: no loss, no joiner and no restart changes what is rehearsed."""

import functools

import pytest
import torch

from elastix.config import CheckpointConfig
from elastix.errors import TrainError
from elastix.events import StateStored
from elastix.observe import journal
from elastix.store import Store
from elastix.testing import replay
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.continual import LENGTH, TASKS, train
from tests.laws import assert_exactly_once, assert_replicas_identical, committed, joins
from tests.run_bytes import kept

EPOCHS, STEPS = 2, TASKS * 2 * LENGTH // 12


def run(directory, workers=3, kills=(), config=(), **options):
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = {"keep": "index", **dict(config), "log": str(logs)}
    result = run_local(
        with_kills(train, list(kills)),
        workers,
        config=settings,
        directory=directory / "run",
        **options,
    )
    assert {kill.worker for kill in kills} == set(result.lost)
    assert_exactly_once(result.events, settings.get("epochs", EPOCHS))
    assert_replicas_identical(logs, set(result.lost), result.events)
    return result


def final(result):
    stored = [event for event in result.events if isinstance(event, StateStored)][-1]
    with Store(result.directory / "store", read_only=True) as store:
        return stored.digest, store.get(stored.ref).clone()


@functools.cache
def quiet(keep, slices=None):
    """One process, undisturbed."""
    directory = kept()
    return final(run(directory, 1, config={"keep": keep, "slices": slices}, exact=bool(slices)))


def furthest(state, other):
    return max(
        float((tensor - other.model[name]).abs().max() / tensor.abs().max())
        for name, tensor in state.model.items()
    )


@pytest.mark.parametrize(
    ("workers", "ratio"), [(4, 0.5), pytest.param(3, 0.3, marks=pytest.mark.slow)]
)
def test_any_number_of_workers_ends_with_the_same_weights(tmp_path, workers, ratio):
    result = run(tmp_path, workers, config={"ratio": ratio})
    alone = run(tmp_path / "alone", 1, config={"ratio": ratio})
    assert len(committed(result.events)) == STEPS
    assert furthest(final(result)[1], final(alone)[1]) < 1e-9


def test_a_worker_is_killed_while_it_rehearses_and_the_replay_ends_with_the_same_weights(tmp_path):
    result = run(tmp_path, 3, [Kill(worker=1, phase="bucket", detail=1, step=11)])
    assert replay.compare(result.directory).relative < 1e-9


@pytest.mark.parametrize("keep", ["index", "samples"])
def test_an_exact_run_that_rehearses_has_the_bytes_of_the_quiet_one(tmp_path, keep):
    config = {"keep": keep, "slices": 4}
    kills = [Kill(worker=2, phase="bucket", step=10), Kill(worker=0, phase="slice", step=19)]
    result = run(tmp_path, 3, kills, config, exact=True)
    (digest, state), (found, ours) = quiet(keep, 4), final(result)
    apart = [n for n, tensor in state.tensors.items() if not torch.equal(tensor, ours.tensors[n])]
    assert not apart
    assert found == digest
    assert replay.compare(result.directory).apart == ()


def test_a_joiner_is_given_samples_whose_dataset_is_gone(tmp_path):
    (tmp_path / "meeting").mkdir()
    held = {"meeting": str(tmp_path / "meeting"), "ushers": {"2": 66}}
    config = {"keep": "samples", "forgets": True, "epochs": 8, **held}
    result = run(tmp_path, 2, [Kill(worker=1, phase="bucket", step=63)], config, replace=True)
    assert (tmp_path / "logs" / "gone0").exists()
    assert [event.step >= 66 for event in joins(result.events)] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_that_was_killed_whole_goes_on_when_the_first_datasets_are_gone(tmp_path, workers):
    config = {"keep": "samples", "forgets": True}
    kills = [Kill(worker=worker, phase="bucket", step=20) for worker in range(workers)]
    options = {"checkpoint": CheckpointConfig(every_steps=3, wait=True)}
    with pytest.raises(TrainError):
        run(tmp_path, workers, kills, config, **options)
    assert (tmp_path / "logs" / "gone0").exists()
    result = run_local(
        train,
        workers,
        config={**config, "log": str(tmp_path / "logs")},
        directory=tmp_path / "run",
        **options,
    )
    assert_exactly_once(list(journal.read(tmp_path / "run" / "journal.jsonl")), EPOCHS)
    if workers == 1:
        assert furthest(final(result)[1], quiet("samples")[1]) == 0.0


@pytest.mark.slow
def test_processes_that_load_ahead_rehearse_the_same(tmp_path):
    result = run(tmp_path, 2, config={"num_workers": 1})
    assert furthest(final(result)[1], quiet("index")[1]) < 1e-9

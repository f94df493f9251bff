"""Each way to use torch ends as plain torch does on the committed batches, or is refused."""

import random

import pytest

from elastix.data.audit import audit
from elastix.errors import ConfigError, TrainError
from elastix.events import StateStored
from elastix.observe import journal
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests.trainables import notes
from tests.ways import WAYS, Noted

SELDOM = {name: pytest.mark.slow if way.seldom else () for name, way in WAYS.items()}
WORKS = [pytest.param(n, marks=SELDOM[n]) for n, way in WAYS.items() if not way.advice]
REFUSED = [name for name, way in WAYS.items() if way.advice]


def run(directory, name, workers, kills=(), **options):
    logs = directory / "logs"
    logs.mkdir(parents=True)
    noted = Noted(name, **options)
    train = with_kills(noted, kills) if kills else noted
    return run_local(train, workers, config={"log": str(logs)}, directory=directory / "run")


def assert_as_plain_torch(directory, name, workers, kills=(), **options):
    """Survivors bit for bit alike, each sample drawn exactly once, and weights as plain torch's.

    Of what a reader of shares would make of the journal, and of what one of whole batches would.
    """
    result = run(directory, name, workers, kills, **options)
    assert audit(result.events).exact
    ends = notes(directory / "logs")
    assert set(ends) >= set(range(workers)) - set(result.lost)  # one more: killed after its end
    assert all(end == next(iter(ends.values())) for end in ends.values()), ends
    way = WAYS[name]
    undisturbed = way.whole == "undisturbed" and not kills
    for whole in (False, True) if undisturbed or way.whole == "always" else (False,):
        difference = compare(directory / "run", whole=whole)
        assert difference.relative <= way.tolerance, (whole, difference)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_without_kills(tmp_path, name):
    assert_as_plain_torch(tmp_path, name, 2)


@pytest.mark.parametrize("name", WORKS)
def test_with_a_kill(tmp_path, name):
    """In the fourth step, which is a further one on its batch where there are such."""
    kill = Kill(worker=1, phase="bucket", step=3)
    result = assert_as_plain_torch(tmp_path, name, 3, [kill])
    assert set(result.lost) == {1}


def test_who_is_left_alone_takes_the_step_that_both_have_reduced(tmp_path):
    kill = Kill(worker=1, phase="round", step=2, after=1)
    assert set(assert_as_plain_torch(tmp_path, "ppo", 2, [kill]).lost) == {1}


def test_a_thread_of_the_users_may_prepare_and_train(tmp_path):
    ends = []
    for threaded in (False, True):
        directory = tmp_path / str(threaded)
        assert audit(run(directory, "accumulation", 2, threaded=threaded).events).exact
        ends.append(notes(directory / "logs"))
    assert ends[0] == ends[1]


AT_ONCE = ["gan", "two_sizes_in_turn", "mixture", "sparse_embeddings", "hook_after_prepare"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n.values[0], marks=() if n.values[0] in AT_ONCE else pytest.mark.slow)
        for n in WORKS
    ],
)
def test_with_a_kill_where_buckets_are_filled_at_once(tmp_path, name):
    kill = Kill(worker=1, phase="bucket", step=3)
    result = assert_as_plain_torch(tmp_path, name, 3, [kill], at_once=True)
    assert set(result.lost) == {1}


@pytest.mark.parametrize(
    ("name", "kill"),
    [
        ("batches_in_advance", Kill(worker=0, phase="left", step=3, after=1)),
        ("alternating_accumulation", Kill(worker=2, phase="bucket", step=1, after=1)),
        ("alternating_accumulation_with_norm", Kill(worker=2, phase="left", step=2, after=1)),
    ],
)
def test_what_is_lost_after_the_end_of_an_epoch_was_seen_comes_back(tmp_path, name, kill):
    """These draw the last batches of an epoch, and see that it has no more, within one step."""
    result = assert_as_plain_torch(tmp_path, name, 3, [kill])
    assert set(result.lost) == {kill.worker}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_goes_wrong(tmp_path, name):
    with pytest.raises((ConfigError, TrainError)) as caught:
        run(tmp_path, name, 2)
    assert WAYS[name].advice in str(caught.value)
    events = journal.read(tmp_path / "run" / "journal.jsonl")
    assert not any(isinstance(event, StateStored) for event in events)


def _schedules(amount):
    """Kills of one or two of three or four workers, spread over the ways that work."""
    chance = random.Random(5)
    names = [name for name, way in WAYS.items() if not way.advice]
    for number in range(amount):
        name = names[number % len(names)]
        workers = min(chance.choice((3, 4)), WAYS[name].most)
        doomed = chance.sample(range(workers), chance.choice((1, 1, 2)))
        kills = [
            Kill(
                worker=worker,
                phase=chance.choice(WAYS[name].places),
                step=chance.randrange(4),
                after=chance.randrange(2),
            )
            for worker in doomed
        ]
        yield pytest.param(name, workers, kills, id=f"{number}-{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers", "kills"), list(_schedules(200)))
def test_under_any_kills(tmp_path, name, workers, kills):
    result = assert_as_plain_torch(tmp_path, name, workers, kills)
    assert set(result.lost) == {kill.worker for kill in kills}

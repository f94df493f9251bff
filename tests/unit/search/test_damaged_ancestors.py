"""Models that trials go on from and that are gone or damaged, and what else changes meanwhile."""

import pytest
from ConfigSpace import ConfigurationSpace, Float, Integer

import elastix
from elastix.search.executors.serial import Local
from tests.search_parts import learns

SPACE = ConfigurationSpace(space=[Float("x", (0.01, 0.5)), Integer("depth", (1, 2))])
RUNGS = elastix.Asha(first=1, eta=2, last=2)


def search(store, trials, **options):
    run = {"name": "family", "store": str(store), **options.pop("run", {})}
    return elastix.Campaign(
        learns,
        **{"space": SPACE, "searcher": elastix.Random(), "rungs": RUNGS, **options},
        metric="accuracy",
        budget=elastix.Budget(trials=trials),
        run=elastix.RunConfig(**run),
        executor=Local(),
        quiet=True,
    ).run()


def damage(store):
    """A byte of every tensor of every model is another one."""
    for pack in (store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        with elastix.Store(store, read_only=True) as opened:
            rows = opened.ledger.index.sql.execute(
                "SELECT b.offset, b.length FROM blobs b JOIN packs p ON p.id = b.pack "
                "WHERE p.name = ?",
                (pack.name,),
            ).fetchall()
        for offset, length in rows:
            if length:
                data[offset] ^= 1
        pack.write_bytes(data)


def retire(store):
    """Somebody has cleared up."""
    with elastix.Store(store) as opened:
        for tag in list(opened.tags()):
            opened.untag(tag)
        for entry in opened.log():
            opened.retire(entry.ref)


@pytest.mark.parametrize("harm", [damage, retire])
def test_paused_trials_whose_states_cannot_be_read_fail_and_the_campaign_goes_on(tmp_path, harm):
    before = search(tmp_path, 6)
    waiting = {trial.number for trial in before if trial.state == "paused"}
    assert waiting
    harm(tmp_path)
    after = search(tmp_path, 16, rungs=elastix.Asha(first=1, eta=2, last=1))
    assert len(after) == 16
    for trial in after:
        expected = "failed" if trial.number in waiting else "finished"
        assert trial.state == expected, trial.traceback
        if trial.number in waiting:
            assert "Corrupt" in trial.traceback or "NotFound" in trial.traceback
    assert search(tmp_path, 16).best.trial.number == after.best.trial.number  # nothing runs again


def test_children_of_a_damaged_model_begin_afresh_and_it_is_said(tmp_path, caplog):
    searcher = elastix.Evolution(population=4, sample=2)
    search(tmp_path, 6, searcher=searcher, rungs=None)
    damage(tmp_path)
    after = search(tmp_path, 30, searcher=searcher, rungs=None)
    assert len(after) == 30
    assert {trial.state for trial in after} == {"finished"}
    assert any(trial.inherited is None for trial in after[6:])
    assert any(trial.inherited for trial in after[6:]), "of later ones"
    assert "inherits nothing: tensor" in caplog.text


def test_a_campaign_goes_on_with_the_seed_that_it_began_with(tmp_path, caplog):
    """Paused trials would be at work with another order of samples, which their loaders refuse."""
    search(tmp_path / "one", 4, run={"seed": 3})
    other = search(tmp_path / "one", 8, run={"seed": 5})
    assert "seed 3" in caplog.text
    caplog.clear()
    search(tmp_path / "two", 4, run={"seed": 3})
    same = search(tmp_path / "two", 8, run={"seed": 3})
    assert caplog.text == ""
    assert not any(trial.state == "failed" for trial in other)
    assert [(t.config, t.state, t.results) for t in other] == [
        (t.config, t.state, t.results) for t in same
    ]

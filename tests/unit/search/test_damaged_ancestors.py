"""Models that trials go on from and that are gone or damaged, and what else changes meanwhile."""

import sqlite3

import pytest
import torch
import torch.nn.functional as F
from ConfigSpace import ConfigurationSpace, Float, Integer

import elastix
from elastix.config import InheritConfig
from elastix.errors import Corrupt, StoreDamaged, StoreError
from elastix.search.executors.serial import Local
from elastix.search.model_sources import InheritTerms, StoreDirectory, TrialModelSource
from elastix.search.trial import Objectives
from elastix.search.trial_database import TrialDatabase
from elastix.store import signature
from tests.search_parts import Net, data, learns

SPACE = ConfigurationSpace(space=[Float("x", (0.01, 0.5)), Integer("depth", (1, 2))])
RUNGS = elastix.Asha(first=1, eta=2, last=2)


def search(store, trials, train=learns, executor=None, **options):
    run = {"name": "family", "store": str(store), **options.pop("run", {})}
    return elastix.Campaign(
        train,
        **{"space": SPACE, "searcher": elastix.Random(), "rungs": RUNGS, **options},
        metric="accuracy",
        budget=elastix.Budget(trials=trials),
        run=elastix.RunConfig(**run),
        executor=executor or Local(),
        quiet=True,
    ).run()


def remembers(ctx):
    """An optimizer that gathers, and samples that are rehearsed."""
    model = Net(ctx.config["depth"])
    memory = elastix.Rehearsal(4, keep="samples", labels=lambda dataset: dataset.tensors[1])
    ctx.inherit(model, memory)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * ctx.config["x"])
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data(), batch_size=32, rehearse=memory).epochs(1):
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ctx.report(accuracy=1 - float(loss.detach()))


def beside_models(store):
    """Digests of what belongs to optimizers and rehearsals alone."""
    beside, of_models = set(), set()
    for entry in store.log():
        for name, info in store.manifest(entry.ref).tensors.items():
            (beside if name.startswith("@") else of_models).add(bytes.fromhex(info.digest))
    return beside - of_models


def damage_beside(store):
    damage(store, beside_models)


def damage(store, which=None):
    """A byte of every tensor of every model is another one, or of those alone."""
    for pack in (store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        with elastix.Store(store, read_only=True) as opened:
            rows = opened.ledger.index.sql.execute(
                "SELECT b.digest, b.offset, b.length FROM blobs b JOIN packs p ON p.id = b.pack "
                "WHERE p.name = ?",
                (pack.name,),
            ).fetchall()
            wanted = which(opened) if which else {digest for digest, _, _ in rows}
        for digest, offset, length in rows:
            if length and digest in wanted:
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


def test_children_of_a_model_whose_optimizer_is_damaged_inherit_the_rest(tmp_path, caplog):
    options = {"searcher": elastix.Evolution(population=4, sample=2), "rungs": None}
    search(tmp_path, 6, remembers, **options)
    damage_beside(tmp_path)
    after = search(tmp_path, 12, remembers, **options)
    assert [t.traceback for t in after] == [None] * 12
    assert any(trial.inherited for trial in after[6:])
    assert "inherits no optimizer: tensor '@optimizer" in caplog.text
    assert "inherits no samples to rehearse: tensor '@rehearsal" in caplog.text
    assert "inherits nothing" not in caplog.text


def source_of(store, provider, ref):
    terms = InheritTerms(
        store=StoreDirectory(str(store)),
        campaign="family",
        objectives=Objectives.of("accuracy"),
        mode="lcs",
        provider=provider,
    )
    return TrialModelSource(terms, 7, {}, parent=ref, in_place=True)


@pytest.mark.parametrize(
    ("harm", "stood", "warns"),
    [(lambda _: None, True, False), (damage_beside, False, True), (retire, False, False)],
)
def test_where_a_parent_stood_is_left_out_if_it_cannot_be_read(
    tmp_path, harm, stood, warns, caplog
):
    with elastix.Store(tmp_path) as store:
        ref = store.put(elastix.State({"w": torch.ones(3), "@optimizer/m": torch.zeros(3)}))
    harm(tmp_path)
    assert (source_of(tmp_path, "parent", ref).place() is not None) == stood
    assert ("trial=7 begins at the beginning" in caplog.text) == warns


def spoil(store, statement):
    """Let the index say what nobody has told it."""
    with sqlite3.connect(store / "index.sqlite") as sql:
        assert sql.execute(statement).rowcount > 0
    sql.close()


def test_a_damaged_index_is_not_taken_for_a_damaged_ancestor(tmp_path):
    model = Net(1)
    with elastix.Store(tmp_path) as store:
        store.put(
            elastix.State(model.state_dict(), {"campaign": "family"}), signature=signature(model)
        )
    spoil(tmp_path, "UPDATE models SET paths = x'00'")
    with pytest.raises(StoreDamaged, match="elastix store rebuild"):
        source_of(tmp_path, "store", None).inherit(Net(1))


@pytest.mark.timeout(30)  # whoever closes the store waits a minute for a question left half asked
@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE clock SET seq = 'x'",  # whoever stores a model meets that
        "UPDATE models SET paths = x'00', rev = 1 + (SELECT rev FROM clock)",  # who looks for one
    ],
)
def test_a_damaged_index_ends_the_campaign_and_no_trial_fails(tmp_path, harm):
    begun = []

    def spoils(ctx):
        begun.append(ctx.config)
        if len(begun) == 4:
            spoil(tmp_path, harm)
        learns(ctx)

    given = {"rungs": None, "inherit": InheritConfig(provider="store")}
    with pytest.raises(StoreDamaged, match="elastix store rebuild"):
        search(tmp_path, 6, spoils, **given)
    assert len(begun) == 4
    with elastix.Store(tmp_path) as store:
        store.rebuild()
    after = search(tmp_path, 6, **given)
    assert [trial.state for trial in after] == ["finished"] * 6
    assert after[3].inherited


def test_packs_that_are_out_of_reach_end_the_campaign_and_no_trial_fails(tmp_path):
    before = search(tmp_path, 6)
    assert any(trial.state == "paused" for trial in before)
    packs, away = tmp_path / "packs", tmp_path / "away"
    hidden = []

    def loses(ctx):
        if not hidden:
            packs.rename(away)
            hidden.append(True)
        learns(ctx)

    more = {"rungs": elastix.Asha(first=1, eta=2, last=1)}
    with pytest.raises(StoreError, match=r"no directory .*packs.*mounted"):
        search(tmp_path, 16, loses, **more)
    packs.exists() or away.rename(packs)
    after = search(tmp_path, 16, **more)
    assert {trial.state for trial in after} == {"finished"}


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


class Refusing(Local):
    """No worker can be had."""

    def open(self, train):
        raise StoreError("no workers")


def test_a_campaign_without_a_trial_has_begun_with_no_seed(tmp_path, caplog):
    with pytest.raises(StoreError, match="no workers"):
        search(tmp_path / "one", 4, executor=Refusing(), run={"seed": 33})
    found = search(tmp_path / "one", 4, run={"seed": 3})
    assert caplog.text == ""
    expected = search(tmp_path / "two", 4, run={"seed": 3})
    assert [trial.config for trial in found] == [trial.config for trial in expected]
    search(tmp_path / "one", 5, run={"seed": 33})
    assert "goes on with seed 3," in caplog.text


def test_a_campaign_whose_seed_is_none_is_damaged(tmp_path):
    search(tmp_path, 2)
    with TrialDatabase(tmp_path / "runs" / "family") as database:
        database.commit([], {"campaign": {**database.fact("campaign"), "seed": None}})
    with pytest.raises(Corrupt, match="holds what is of no campaign"):
        search(tmp_path, 4)

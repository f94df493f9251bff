"""What trials take from a store and leave there, on a worker that runs one after the other."""

import pickle
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from elastix.config import InheritMode
from elastix.search import model_sources
from elastix.search.executors.executor import Work
from elastix.search.executors.in_process import execute
from elastix.search.executors.pool_worker import packed
from elastix.search.executors.store_access import HostDirectory, _place
from elastix.search.model_sources import (
    InheritTerms,
    StoreDirectory,
    StoredModelSource,
    TrialModelSource,
    let_go,
)
from elastix.search.results import Best
from elastix.search.trial import Objectives, Suggestion, Trial, TrialState
from elastix.state import Ref, State, capture
from elastix.store import Store, owner, signature
from elastix.store.ledger import Ledger
from elastix.store.server import _Client, _Server
from elastix.train.replica.model_source import TrainedModel
from elastix.train.replica.solo import run_alone
from tests.unit.test_state import HasMore
from tests.unit.train.solo import solo


@dataclass(frozen=True)
class Served:
    """A store whose index another process owns."""

    path: str
    servers: ClassVar[dict[str, _Server]] = {}

    def open(self) -> Store:
        server = self.servers.setdefault(self.path, _Server(self.path, None, None))
        return Store(self.path, ledger=cast(Ledger, _Client(server.call)))


def terms_in(store: Path, mode: InheritMode = "lcs") -> InheritTerms:
    """Of a campaign in whose store a trial inherits from its parent."""
    return InheritTerms(
        store=model_sources.StoreDirectory(str(store)),
        campaign="c",
        objectives=Objectives.of("score"),
        mode=mode,
        provider="parent",
    )


def test_a_worker_writes_all_its_trials_models_to_one_pack(tmp_path: Path) -> None:
    terms = InheritTerms(
        store=Served(str(tmp_path)),
        campaign="c",
        objectives=Objectives.of("score"),
        mode="lcs",
        provider="store",
    )
    for number in range(4):
        model = torch.nn.Linear(3, 2)
        source = TrialModelSource(replace(terms, store=Served(str(tmp_path))), number, {})
        source.inherit(model)
        state = State(dict(model.state_dict()))
        source.leave(TrainedModel(model, state, {"score": float(number)}, 1.0, "final"))
    assert len(list((tmp_path / "packs").iterdir())) == 1
    assert len(list((tmp_path / "writers").iterdir())) == 1, "a file that stays open"


@pytest.mark.parametrize("heard_all", [True, False])
def test_a_worker_that_has_not_heard_all_of_a_trial_leaves_its_model_without_a_score(
    tmp_path: Path, heard_all: bool
) -> None:
    """It took the place of others, or went on from a checkpoint: the campaign has the score."""
    model = torch.nn.Linear(3, 2)
    left = TrainedModel(model, capture({"": model}, {}), {"loss": 1.0}, 1.0, "final", heard_all)
    found = TrialModelSource(terms_in(tmp_path), 3, {}).leave(left)
    assert (found is None) == heard_all
    if found is not None:
        with Store(tmp_path, read_only=True) as store:
            assert (store.score(found.ref), store.manifest(found.ref).meta["trial"]) == (None, 3)


def test_a_run_that_descends_from_a_trial_reads_its_model_on_any_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller has the store open on one; a worker on another reads beside it."""
    model, child = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    boot = tmp_path / "boot_id"
    boot.write_text("another machine")
    with Store(tmp_path) as store:
        ref = store.put(State(dict(model.state_dict())), signature=signature(model))
        best = Best(
            Trial(0, Suggestion({}), TrialState.FINISHED, (0.0,), ref=ref), {}, str(tmp_path)
        )
        source: Any = best.trainer(print)._asked.model_source
        monkeypatch.setattr(owner, "_BOOT", boot)
        assert source.inherit(child)["share"] == 1.0
        model_sources._opened.pop(source.store).close()
    assert torch.equal(child.weight, model.weight)


def test_a_model_that_has_more_than_tensors_is_left_with_all_of_it(tmp_path: Path) -> None:
    terms = terms_in(tmp_path, mode="none")
    model = HasMore({"seen": 7, "scale": torch.ones(2)})
    left = TrainedModel(model, capture({"": model}, {}), {"score": 0.5}, 1.0, "final")
    stored = TrialModelSource(terms, 0, {}).leave(left)
    assert stored is not None
    model_sources.let_go(terms.store)
    trial = Trial(0, Suggestion({}), TrialState.FINISHED, (0.0,), ref=stored.ref)
    assert Best(trial, {}, str(tmp_path)).model(lambda _: HasMore(None)).more["seen"] == 7


def test_what_a_train_function_does_to_its_config_is_not_what_was_tried(tmp_path: Path) -> None:
    config = {"lr": 0.1, "body": [{"width": 4}, {"width": 8}]}

    def train(ctx: Any) -> None:
        assert ctx.config == config
        ctx.config["lr"] *= 10
        ctx.config["body"].pop()["width"] = 2
        ctx.prepare(torch.nn.Linear(3, 2))
        ctx.report(score=1.0)

    terms = terms_in(tmp_path)
    source = TrialModelSource(terms, 0, config)
    work = Work(number=0, name="c-00000", config=config, seed=1, model_source=source)
    there = pickle.loads(packed(work))  # as a worker gets it
    ended = execute(train, there, worker="w", tell=lambda _: None)
    model_sources.let_go(terms.store)
    assert ended.ref is not None, ended
    with Store(tmp_path, read_only=True) as store:
        assert store.manifest(ended.ref).meta["config"] == config


def test_all_workers_of_a_trial_have_one_ancestor_whatever_is_stored_meanwhile(
    tmp_path: Path,
) -> None:
    """Each looks for it by itself, as does who joins later, and the trial when it runs again."""

    def put(store: Store, score: float) -> Ref:
        made = torch.nn.Linear(3, 2)
        state = State(dict(made.state_dict()), {"campaign": "c", "trial": int(score)})
        return store.put(state, signature=signature(made), score=score)

    terms = replace(terms_in(tmp_path), provider="store")
    with Store(tmp_path) as store:
        first = put(store, 1.0)
        asked_s = time.time()
        source = TrialModelSource(terms, 7, {}, asked_s=asked_s)
        workers = [pickle.loads(pickle.dumps(source.for_group())) for _ in range(2)]
        refs = []
        for number, worker in enumerate(workers, 2):
            found = worker.inherit(torch.nn.Linear(3, 2))
            refs.append(found and found["ref"])
            latest = put(store, float(number))  # another trial ends just then, and has done better
        alone = source.inherit(torch.nn.Linear(3, 2))
    model_sources.let_go(terms.store)
    assert refs == [first, first]
    assert alone is not None
    assert alone["ref"] == latest


def test_a_model_that_has_more_than_tensors_inherits_them(tmp_path: Path) -> None:
    parent, child = HasMore({"seen": 7}), HasMore({"seen": 0})
    with Store(tmp_path) as store:
        ref = store.put(capture({"": parent}, {}), signature=signature(parent))
    terms = terms_in(tmp_path)
    found = TrialModelSource(terms, 1, {}, parent=ref).inherit(child)
    model_sources.let_go(terms.store)
    assert found is not None
    assert found["share"] == 1.0
    assert torch.equal(child.weight, parent.weight)


@pytest.mark.parametrize(("given", "frozen"), [(True, True), (False, False), ("head", False)])
def test_what_is_inherited_is_frozen_where_the_space_says_true(
    tmp_path: Path, given: object, frozen: bool
) -> None:
    """A hyperparameter of that name may mean something else: what else is to be frozen."""
    with Store(tmp_path) as store:
        parent, child = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        ref = store.put(State(dict(parent.state_dict())), signature=signature(parent))
    terms = terms_in(tmp_path)
    found = TrialModelSource(terms, 1, {"freeze": given}, parent=ref).inherit(child)
    model_sources.let_go(terms.store)
    assert found is not None
    assert child.weight.requires_grad is not frozen


@pytest.mark.parametrize(
    ("freeze", "alike", "array"),
    [(True, True, False), (False, False, False), (False, True, False), (False, False, True)],
)
def test_what_one_trial_has_inherited_or_frozen_is_no_beginning_of_the_next(
    tmp_path: Path, freeze: bool, alike: bool, array: bool
) -> None:
    """A module outside of the train function that no trial trains: unless it stays as it was.

    Or one that is made in it, of an array of NumPy outside.
    """
    outside = torch.nn.Linear(3, 2)
    weights = np.zeros((2, 3), np.float32)
    with Store(tmp_path / "store") as store:
        state = {name: tensor.clone() for name, tensor in outside.state_dict().items()}
        if not alike:
            state["weight"] += 1
        ref = store.put(State(state), signature=signature(outside))
    terms = terms_in(tmp_path / "store")

    def train(ctx: Any) -> None:
        own = torch.nn.Linear(3, 2) if array else outside
        if array:
            own.weight = torch.nn.Parameter(torch.from_numpy(weights))
        model = torch.nn.Sequential(own, torch.nn.Linear(2, 1))
        ctx.inherit(model)
        ctx.prepare(model)

    source = TrialModelSource(terms, 1, {"freeze": freeze}, parent=ref)
    source.leave = lambda left: None  # type: ignore[method-assign, misc, assignment]
    run_alone(train, {}, solo(tmp_path, model_source=source), print)
    model_sources.let_go(terms.store)
    outcome = run_alone(train, {}, solo(tmp_path), print)
    as_before = alike and not freeze
    assert outcome.kind == ("finished" if as_before else "raised"), outcome
    assert as_before or "as an earlier trial of this process has left it" in str(outcome.error)


def test_a_model_is_as_old_as_the_owner_of_the_index_says_whoever_stores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose clock is behind stores after a proposal what seemed to have been there."""
    server, now, skew = _Server(str(tmp_path), None, None), time.time, [-3600.0]

    def ask(*question: Any) -> Any:
        behind, skew[0] = skew[0], 0.0
        try:
            return server.call(*question)
        finally:
            skew[0] = behind

    monkeypatch.setattr("time.time", lambda: now() + skew[0])
    proposed_s, model = now(), torch.nn.Linear(3, 2)
    with Store(tmp_path, ledger=cast(Ledger, _Client(ask))) as worker:
        ref = worker.put(capture({"": model}, {}), signature=signature(model))
        share = worker.put_share(State({"w": torch.ones(1)}))
        worker.put_shares([share], signature=signature(model))
        assert worker.nearest(signature(model), until_s=proposed_s) is None
        found = worker.nearest(signature(model), until_s=now())
        assert found is not None
        assert found.ref == ref
    server.close()


def test_a_directory_is_here_by_what_it_is_and_not_by_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may be renamed; and a container with its host's name may have another one there."""
    path = tmp_path / "store"
    path.mkdir()
    (tmp_path / "link").symlink_to(path)
    found = HostDirectory(str(path), place=_place(str(path)), actor="a")
    monkeypatch.setattr("socket.gethostname", lambda: "renamed")
    assert found.is_here
    assert replace(found, path=str(tmp_path / "link")).is_here
    path.rename(tmp_path / "of the host")
    assert not found.is_here
    path.mkdir()
    assert not found.is_here


def test_a_layer_that_is_used_twice_is_inherited_once_and_whole(tmp_path: Path) -> None:
    """Half of such a model was said to be inherited."""

    def build() -> torch.nn.Sequential:
        layer = torch.nn.Linear(4, 4)
        return torch.nn.Sequential(layer, torch.nn.ReLU(), layer)

    ancestor = build()
    with Store(tmp_path) as store:
        ref = store.put(State(ancestor.state_dict()), signature=signature(ancestor))
    opener = StoreDirectory(str(tmp_path))
    try:
        found = StoredModelSource(opener, ref).inherit(build())
        assert found is not None
        assert found["share"] == 1.0
    finally:
        let_go(opener)


def test_of_a_pause_the_step_alone_is_read_to_see_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller looks there each time that all go back, and others wait for it."""
    terms = terms_in(tmp_path)
    with terms.store.open() as store:
        ref = store.put(State({"w": torch.ones(3)}, {"step": 6}))
    source = TrialModelSource(terms, 0, {}, paused=ref)
    begins = TrialModelSource(terms, 1, {})
    monkeypatch.delattr(Store, "get")
    assert (source.paused_step(), begins.paused_step()) == (6, 0)
    model_sources.let_go(terms.store)


def test_of_a_model_that_is_left_it_is_said_how_large_it_is_and_what_of_it_is_new(
    tmp_path: Path,
) -> None:
    """What a trial has inherited, and did not change, is in the store already."""
    terms, model = terms_in(tmp_path, mode="none"), torch.nn.Linear(3, 2)
    sizes = []
    for number in range(2):
        state = capture({"": model}, {})
        left = TrainedModel(model, state, {"score": 0.5}, 1.0, "final")
        stored = TrialModelSource(terms, number, {}).leave(left)
        assert stored is not None
        sizes.append((stored.state_bytes, stored.stored_bytes))
        with torch.no_grad():
            model.bias.add_(1.0)
    model_sources.let_go(terms.store)
    assert sizes == [(32, 32), (32, 8)]


def test_children_inherit_what_an_optimizer_of_any_name_has_gathered(tmp_path: Path) -> None:
    """As `ctx.track(adam=optimizer)` calls one that is made after the model was prepared."""
    terms = replace(terms_in(tmp_path), optimizer=True)
    model, child = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    state = capture({"": model}, {"adam": adam})
    left = TrainedModel(model, state, {"score": 0.5}, 1.0, "final")
    stored = TrialModelSource(terms, 0, {}).leave(left)
    assert stored is not None
    source = TrialModelSource(terms, 1, {}, parent=stored.ref)
    found, theirs = source.inherit(child), torch.optim.Adam(child.parameters())
    assert found is not None
    source.warm_start(found, {"": child}, {"adam": theirs})
    model_sources.let_go(terms.store)
    gathered = [theirs.state[parameter]["exp_avg"] for parameter in child.parameters()]
    assert all(
        torch.equal(mine, adam.state[p]["exp_avg"])
        for mine, p in zip(gathered, model.parameters(), strict=True)
    )

"""Rehearsal in a train function: from an ancestor to its child, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

import elastix
from elastix.errors import ConfigError
from elastix.events import StateStored
from elastix.search.model_sources import InheritTerms, StoreDirectory, TrialModelSource
from elastix.search.trial import Objectives
from elastix.train.replica.context import Context
from elastix.train.replica.solo import run_alone
from elastix.train.replica.tracked_objects import TrackedObjects
from tests.continual import train
from tests.unit.train.solo import solo


def scored(ctx):
    train(ctx)
    ctx.report(score=1.0)


def test_a_child_rehearses_what_its_parent_has_kept(tmp_path):
    """Two tasks and, in a child, the third: the same weights as all three in one run."""
    terms = InheritTerms(
        store=StoreDirectory(str(tmp_path / "store")),
        campaign="c",
        objectives=Objectives.of("score", "max"),
        mode="lcs",
        provider="parent",
        optimizer=True,
    )
    refs = {}
    for number, (name, tasks, parent) in enumerate(
        [("whole", (0, 3), None), ("parent", (0, 2), None), ("child", (2, 3), "parent")]
    ):
        (tmp_path / name).mkdir()
        source = TrialModelSource(terms, number, {}, parent=refs.get(parent))
        config = {"keep": "samples", "tasks": tasks, "log": str(tmp_path / name), "inherits": True}
        events = []
        own = solo(tmp_path, model_source=source, run=name)
        outcome = run_alone(scored, config, own, events.append)
        assert outcome.kind == "finished", outcome.error
        (refs[name],) = (event.ref for event in events if isinstance(event, StateStored))
    with terms.store.open() as store:
        whole, child = (store.get(refs[name]) for name in ("whole", "child"))
        kept = [name for name in whole.tensors if name.startswith("@rehearsal")]
        assert len(kept) >= 24
        assert all(torch.equal(whole.tensors[n], t) for n, t in child.tensors.items())
        assert child.tensors.keys() == whole.tensors.keys()


@pytest.mark.parametrize("wrong", [5, "memory", [elastix.Rehearsal(3)], elastix.Rehearsal])
def test_what_is_no_rehearsal_is_refused(wrong):
    ctx = Context(SimpleNamespace(prepared=True), {})
    with pytest.raises(ConfigError, match=r"ctx\.loader got .* no elastix\.Rehearsal"):
        ctx.loader([1, 2], 2, rehearse=wrong)
    with pytest.raises(ConfigError, match=r"ctx\.inherit got .* no elastix\.Rehearsal"):
        ctx.inherit(torch.nn.Linear(1, 1), wrong)


def test_a_rehearsal_is_neither_prepared_nor_tracked_under_its_name():
    tracked, model = TrackedObjects(), torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="Give it to the loaders"):
        tracked.prepare([model, elastix.Rehearsal(3)], torch.device("cpu"))
    with pytest.raises(ConfigError, match="is taken"):
        tracked.track({"rehearsal": torch.optim.SGD(model.parameters(), lr=0.1)})

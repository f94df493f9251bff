"""A run alone in its process: the same as plain torch, at next to no cost, and no socket."""

import gc
import socket
import sys
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from elastix.comm.gradients.buffer_bucket import BufferBucket
from elastix.config import CheckpointConfig, Guard
from elastix.errors import ConfigError
from elastix.events import Reported, StateStored, StepCommitted, TensorsInherited
from elastix.search.model_sources import InheritTerms, StoreDirectory, TrialModelSource
from elastix.search.trial import Objectives
from elastix.state import State
from elastix.train.checkpoint.saver import Saver
from elastix.train.replica.model_source import LeftModel
from elastix.train.replica.solo import run_alone
from tests.search_parts import Net, accuracy, data
from tests.unit.train.solo import solo


class Keeps:
    """A model source that keeps what is left in memory."""

    parents = ()
    takes_final = True
    has_ancestor = True

    def __init__(self, state=None):
        self.state = state
        self.left = []

    def inherit(self, model):
        with torch.no_grad():
            model.head.bias.fill_(0.5)
        return {"ref": "0" * 64, "lineage_epochs": 4.0}

    def warm_start(self, found, modules, others):
        self.warmed = (found["ref"], list(modules), sorted(others))

    def resume(self):
        return self.state

    def place(self):
        return None

    def leave(self, leaving):
        tensors = {name: tensor.clone() for name, tensor in leaving.state.tensors.items()}
        self.left.append((State(tensors, leaving.state.meta), leaving.epochs, leaving.reason))
        return LeftModel("1" * 64, 7, 3)


def train(ctx):
    model = Net(2).double()
    ctx.config["models"].append(model)
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    loader = ctx.loader(data(), batch_size=32, shuffle=False)
    for epoch in loader.epochs(3):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
        ctx.report(epoch=epoch.number)


def test_it_gives_bit_for_bit_what_plain_torch_gives(tmp_path):
    models, events = [], []
    keeps = Keeps()
    outcome = run_alone(
        train, {"models": models}, solo(tmp_path, model_source=keeps), events.append
    )
    assert (outcome.kind, outcome.epochs, outcome.step) == ("finished", 3, 9)
    torch.manual_seed(3)
    plain = Net(2).double()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(3):
        for x, y in DataLoader(data(), batch_size=32):
            optimizer.zero_grad()
            F.cross_entropy(plain(x.double()), y).backward()
            optimizer.step()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(models[0].state_dict()[name], tensor), name
    assert [e.step for e in events if isinstance(e, StepCommitted)] == list(range(1, 10))
    (state, epochs, reason) = keeps.left[0]
    assert (epochs, reason) == (3, "final")
    assert torch.equal(state.model["head.weight"], plain.head.weight)
    (stored,) = [event for event in events if isinstance(event, StateStored)]
    assert (stored.state_bytes, stored.stored_bytes) == (7, 3), "as its model source says"


def test_a_run_that_is_over_costs_later_ones_nothing(tmp_path):
    """Its hook on all optimizers of the process is gone at once, not when gc comes by."""
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    gc.collect()
    gc.disable()
    try:
        before = len(hooks)
        for _ in range(3):
            run_alone(train, {"models": []}, solo(tmp_path), print)
        assert len(hooks) <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["ends", "raises within a step", "two ratios", "evaluates"])
def test_a_run_that_is_over_keeps_no_model(tmp_path, how):
    """Each trial left its model in its worker: autograd keeps hooks where gc does not look."""
    models = []

    def train(ctx):
        model = Net(2).double()
        models.append(weakref.ref(model))
        model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        loader = ctx.loader(data(), batch_size=64, shuffle=False)  # one of 64, and one of 32
        for epoch in loader.epochs(2):
            for x, y in epoch:
                added_up = how == "two ratios" and len(x) == 64
                with ctx.accumulate() if added_up else nullcontext():
                    F.cross_entropy(model(x.double()), y).backward()
                if how.startswith("raises"):
                    raise ValueError("on purpose")
                if not added_up:
                    optimizer.step()
                    optimizer.zero_grad()
        if how == "evaluates":
            ctx.evaluate(lambda m, b: accuracy(m, (b[0].double(), b[1])), data(), batch_size=32)

    outcome = run_alone(train, {}, solo(tmp_path), print)
    assert outcome.kind == ("raised" if how.startswith("raises") else "finished"), outcome.summary
    gc.collect()
    assert [model() for model in models] == [None]


def test_one_that_goes_on_from_a_state_compares_it_with_nobodys(tmp_path, monkeypatch):
    """Each trial that was paused left a thread behind, with a copy of its State."""
    first = Keeps()
    run_alone(train, {"models": []}, solo(tmp_path, model_source=first, until_reports=1), print)
    ((state, _, reason),) = first.left
    assert reason == "paused"
    monkeypatch.setattr(Saver, "save", lambda *_: pytest.fail("a copy was taken"))
    before = threading.enumerate()
    again = Keeps(state)
    outcome = run_alone(train, {"models": []}, solo(tmp_path, model_source=again), print)
    assert (outcome.kind, outcome.epochs) == ("finished", 3)
    assert threading.enumerate() == before


def test_no_socket_is_opened(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    before = threading.active_count()
    outcome = run_alone(train, {"models": []}, solo(tmp_path, model_source=Keeps()), print)
    assert outcome.kind == "finished"
    assert threading.active_count() == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wait", [False, True])
def test_without_a_heritage_nothing_is_kept_and_nobody_is_waited_for(tmp_path, wait):
    checkpoint = CheckpointConfig(every_steps=2, wait=wait)
    events = []
    outcome = run_alone(train, {"models": []}, solo(tmp_path, checkpoint=checkpoint), events.append)
    assert (outcome.kind, outcome.step) == ("finished", 9)
    assert not [event for event in events if isinstance(event, StateStored)]


def test_reports_need_no_model(tmp_path):
    events = []
    outcome = run_alone(lambda ctx: ctx.report(score=1.5), {}, solo(tmp_path), events.append)
    assert outcome.kind == "finished"
    assert [e.metrics for e in events if isinstance(e, Reported)] == [{"score": 1.5}]


def test_a_pause_ends_at_the_boundary_after_a_report(tmp_path):
    keeps, events = Keeps(), []
    paused = solo(tmp_path, model_source=keeps, until_reports=2)
    outcome = run_alone(train, {"models": []}, paused, events.append)
    assert (outcome.kind, outcome.paused, outcome.step) == ("finished", True, 6)
    state, epochs, reason = keeps.left[0]
    assert (epochs, reason, state.meta["reports"]) == (2, "paused", 2)
    events.clear()
    rest = solo(tmp_path, model_source=Keeps(state))
    outcome = run_alone(train, {"models": []}, rest, events.append)
    assert (outcome.kind, outcome.paused, outcome.step) == ("finished", False, 9)
    assert [(e.seq, e.metrics) for e in events if isinstance(e, Reported)] == [(2, {"epoch": 2})]


def test_without_a_model_a_pause_ends_at_the_report_itself(tmp_path):
    events, keeps = [], Keeps()
    after = []

    def reports(ctx):
        for epoch in range(5):
            ctx.report(epoch=epoch)
        after.append(ctx)

    paused = solo(tmp_path, model_source=keeps, until_reports=2)
    outcome = run_alone(reports, {}, paused, events.append)
    assert (outcome.kind, outcome.paused, outcome.epochs) == ("finished", True, 2)
    assert [e.metrics["epoch"] for e in events if isinstance(e, Reported)] == [0, 1]
    assert not after
    assert not keeps.left


@pytest.mark.parametrize("marks", [True, False])
def test_a_loop_that_nobody_can_pause_is_told_how_it_could_be(tmp_path, marks):
    def own_loop(ctx):
        model = Net(2).double()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        x, y = data()[:32]
        for epoch in range(4):
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x.double()), y).backward()
                optimizer.step()
                if marks:
                    ctx.boundary()
            ctx.report(epoch=epoch)
            ctx.report(more=epoch)  # two reports with no step between them are no harm

    keeps = Keeps()
    paused = solo(tmp_path, model_source=keeps, until_reports=3)
    outcome = run_alone(own_loop, {}, paused, print)
    if marks:
        assert (outcome.kind, outcome.paused, len(keeps.left)) == ("finished", True, 1)
    else:
        assert outcome.kind == "raised"
        assert isinstance(outcome.error, ConfigError)
        assert "ctx.boundary()" in str(outcome.error)
        assert "after 3 reports" in str(outcome.error)


def test_halted_between_steps(tmp_path):
    halt = threading.Event()

    def stops(ctx):
        ctx.on_phase(lambda name, step: halt.set() if (name, step) == ("round", 1) else None)
        train(ctx)

    outcome = run_alone(stops, {"models": []}, solo(tmp_path), print, halted=halt.is_set)
    assert (outcome.kind, outcome.step) == ("halted", 1)


def test_inheriting_comes_before_prepare_and_is_told(tmp_path):
    events = []

    def inherits(ctx):
        model = Net(1)
        assert ctx.inherit(model)["lineage_epochs"] == 4.0
        assert (model.head.bias == 0.5).all()
        ctx.prepare(model)
        ctx.inherit(model)

    keeps = Keeps()
    outcome = run_alone(inherits, {}, solo(tmp_path, model_source=keeps), events.append)
    assert keeps.warmed == ("0" * 64, [""], ["rng"])
    assert isinstance(outcome.error, ConfigError)
    assert "ctx.inherit" in str(outcome.error)
    assert [e.found["ref"] for e in events if isinstance(e, TensorsInherited)] == ["0" * 64]


@pytest.mark.parametrize("asks", [["first", "second"], ["second"]], ids=["both", "second"])
def test_a_further_model_inherits_nothing(tmp_path, asks):
    """Its layers could be taken for those of the ancestor's first one."""

    def inherits(ctx):
        models = {"first": Net(1), "second": Net(1)}
        for name in asks:
            ctx.inherit(models[name])
        ctx.prepare(*models.values())

    outcome = run_alone(inherits, {}, solo(tmp_path, model_source=Keeps()), print)
    assert isinstance(outcome.error, ConfigError)
    assert "another model than the first argument" in str(outcome.error)


def test_inherit_is_nothing_outside_of_a_campaign(tmp_path):
    found = []
    run_alone(lambda ctx: found.append(ctx.inherit(Net(1))), {}, solo(tmp_path), print)
    assert found == [None]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_child_of_the_same_architecture_goes_on_as_if_nothing_had_ended(tmp_path, keeps):
    """With what the optimizer had gathered, to the last bit; without, it does not."""

    def epochs(ctx):
        torch.manual_seed(1)
        model = Net(2).double()
        ctx.inherit(model)
        model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        loader = ctx.loader(data(), batch_size=32, shuffle=False)
        for epoch in loader.epochs(ctx.config["epochs"]):
            for x, y in epoch:
                optimizer.zero_grad()
                F.cross_entropy(model(x.double()), y).backward()
                optimizer.step()
            ctx.report(score=epoch.number)

    terms = InheritTerms(
        store=StoreDirectory(str(tmp_path / "store")),
        campaign="c",
        objectives=Objectives.of("score", "max"),
        mode="lcs",
        provider="parent",
        optimizer=keeps,
    )
    refs = {}
    for number, (name, passes, parent) in enumerate(
        [("whole", 2, None), ("parent", 1, None), ("child", 1, "parent")]
    ):
        model_source = TrialModelSource(terms, number, {}, parent=refs.get(parent))
        own = solo(tmp_path, model_source=model_source, run=name)
        events = []
        assert run_alone(epochs, {"epochs": passes}, own, events.append).kind == "finished"
        (refs[name],) = (event.ref for event in events if isinstance(event, StateStored))
    with terms.store.open() as store:
        whole, child = (store.get(refs[name]) for name in ("whole", "child"))
        assert any(name.startswith("@optimizer") for name in child.tensors) == keeps
        same = all(torch.equal(whole.model[name], tensor) for name, tensor in child.model.items())
        assert same == keeps
        assert child.meta["lineage_epochs"] == 2


def test_ctrl_c_is_not_taken_for_the_train_functions_own(tmp_path):
    def interrupted(ctx):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_alone(interrupted, {}, solo(tmp_path), print)


def test_a_file_that_is_missing_is_told_with_the_folder_if_its_path_is_relative(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    told = f"worker runs in the folder {tmp_path} on {socket.gethostname()}"
    for path, is_told in ((Path("data.txt"), True), (tmp_path / "data.txt", False)):
        outcome = run_alone(lambda ctx, path=path: path.read_text(), {}, solo(tmp_path), print)
        assert "FileNotFoundError" in outcome.traceback
        assert (told in outcome.traceback) == is_told


def test_evaluation(tmp_path):
    found = []

    def evaluates(ctx):
        ctx.prepare(Net(1))
        found.append(ctx.evaluate(accuracy, data(), batch_size=40))
        found.append((ctx.rank, ctx.world_size))

    assert run_alone(evaluates, {}, solo(tmp_path, model_source=Keeps()), print).kind == "finished"
    assert 0 <= found[0]["accuracy"] <= 1
    assert found[1] == (0, 1)


WRONG = {
    "batch_size": [{"batch_size": "4"}, {"batch_size": 1.5}, {"batch_size": 0}],
    "map-style": [{"dataset": None}, {"dataset": iter([1])}, {"dataset": []}],
    "metric must be a function": [{"metric": 0.5}],
    "collate_fn must be a function": [{"collate_fn": "list"}],
}


@pytest.mark.parametrize(
    ("said", "given"), [(said, given) for said, several in WRONG.items() for given in several]
)
def test_an_evaluation_that_cannot_be_is_refused(tmp_path, said, given):
    def evaluates(ctx):
        ctx.prepare(Net(1))
        ctx.evaluate(**{"metric": accuracy, "dataset": data(), "batch_size": 4, **given})

    outcome = run_alone(evaluates, {}, solo(tmp_path, model_source=Keeps()), print)
    assert isinstance(outcome.error, ConfigError)
    assert said in str(outcome.error)


WITHIN = {
    "ctx.mean": lambda ctx, loss: ctx.mean(loss=loss),
    "ctx.report": lambda ctx, loss: ctx.report(loss=0.5),
    "ctx.evaluate": lambda ctx, loss: ctx.evaluate(accuracy, data(), batch_size=4),
    "ctx.boundary": lambda ctx, loss: ctx.boundary(),
    "its next batch": lambda ctx, loss: [
        batch for epoch in ctx.loader(data(), batch_size=4).epochs(1) for batch in epoch
    ],
    "backward()": lambda ctx, loss: loss.backward(),
}


@pytest.mark.parametrize("call", WITHIN)
def test_what_workers_do_together_has_no_place_in_a_metric(tmp_path, call):
    """It would be done another number of times by each, and once more if one is lost."""

    def evaluates(ctx):
        ctx.prepare(Net(1))

        def metric(module, batch):
            with torch.enable_grad():
                WITHIN[call](ctx, sum(p.sum() for p in module.parameters()))
            return 0.5

        ctx.evaluate(metric, data(), batch_size=4)

    outcome = run_alone(evaluates, {}, solo(tmp_path, model_source=Keeps()), print)
    assert isinstance(outcome.error, ConfigError)
    assert call in str(outcome.error)
    assert "by the metric" in str(outcome.error)


def normed(ctx):
    """A model with statistics in buffers, and a loss that is not finite for one batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ctx.config["models"].append(model)
    for epoch in ctx.loader(ctx.config["data"], batch_size=4, shuffle=False).epochs(1):
        for (x,) in epoch:
            loss = model(x).mean()
            (loss * float("nan") if x[0, 0] == ctx.config["bad"] else loss).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_buffers_are_copied_only_where_a_step_may_be_void(tmp_path, monkeypatch):
    copies = []
    monkeypatch.setattr(BufferBucket, "remember", copies.append)
    config = {"models": [], "data": TensorDataset(torch.rand(12, 4)), "bad": -1.0}
    run_alone(normed, config, solo(tmp_path), [].append)
    assert copies == []


class Reads(TorchDispatchMode):
    """Which operations gave the host a value, for each of which it would wait for a GPU."""

    KINDS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in self.KINDS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "number"), [("Identity", 0), ("BatchNorm1d", 4)])
def test_a_backward_pass_reads_few_values(tmp_path, kind, number):
    found = []

    def steps(ctx):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), getattr(torch.nn, kind)(4))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            loss = model(torch.rand(8, 4)).square().sum()
            with Reads() as reads:
                loss.backward()
            found.append(reads.found)
            optimizer.step()
            optimizer.zero_grad()
            ctx.boundary()

    outcome = run_alone(steps, {}, solo(tmp_path), [].append)
    assert outcome.traceback == ""
    assert {len(reads) for reads in found} == {number}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_buffer_that_moves_while_backward_goes_on_keeps_what_it_was_given(tmp_path, dtype):
    found = []

    class Counts(torch.nn.Linear):
        """Its backward passes, in a buffer."""

        def forward(self, x):
            y = super().forward(x)
            y.register_hook(self.count)
            return y

        def count(self, _):
            self.passes.add_(1)

    def steps(ctx):
        model = torch.nn.Sequential(Counts(4, 4), torch.nn.Linear(4, 1))
        model[0].register_buffer("passes", torch.zeros((), dtype=dtype))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            model(torch.rand(8, 4)).mean().backward()
            found.append(int(model[0].passes))
            optimizer.step()
            optimizer.zero_grad()
            ctx.boundary()

    outcome = run_alone(steps, {}, solo(tmp_path), [].append)
    assert outcome.traceback == ""
    assert found == [1, 2, 3, 4]


def test_a_void_step_leaves_no_trace_in_buffers(tmp_path):
    rows = torch.rand(12, 4, generator=torch.Generator().manual_seed(1))
    config = {"models": [], "bad": float(rows[4, 0])}
    guarded = solo(tmp_path, guard=Guard())
    run_alone(normed, {**config, "data": TensorDataset(rows)}, guarded, [].append)
    good = TensorDataset(torch.cat([rows[:4], rows[8:]]))
    run_alone(normed, {**config, "data": good}, solo(tmp_path), [].append)
    one, other = (model.state_dict() for model in config["models"])
    assert {name: value.tolist() for name, value in one.items()} == {
        name: value.tolist() for name, value in other.items()
    }


def test_a_mean_of_one_is_its_own_and_what_is_no_number_is_refused(tmp_path):
    found = []

    def train(ctx):
        found.append(ctx.mean(loss=torch.tensor(2.0), n=3))
        for wrong in ({}, {"a": "text"}, {"a": None}, {"a": torch.ones(2)}, {"a": [1]}):
            with pytest.raises(ConfigError):
                ctx.mean(**wrong)

    outcome = run_alone(train, {}, solo(tmp_path), print)
    assert outcome.kind == "finished", outcome
    assert found == [{"loss": 2.0, "n": 3.0}]


def test_a_frozen_part_of_inference_mode_is_no_matter_in_slices(tmp_path):
    """Torch does not count its changes, and there are none."""

    def train(ctx):
        with torch.inference_mode():
            frozen = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
        model = torch.nn.Sequential(frozen, torch.nn.Linear(4, 1))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        for epoch in ctx.loader(TensorDataset(torch.rand(8, 4)), 4, slices=4).epochs(1):
            for step in epoch:
                for (x,) in step:
                    model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    outcome = run_alone(train, {}, solo(tmp_path), print)
    assert (outcome.kind, outcome.step) == ("finished", 2), outcome


def test_an_optimizer_that_is_tracked_after_the_model_begins_with_what_its_ancestors_had(tmp_path):
    keeps = Keeps()

    def late(ctx):
        model = Net(2)
        ctx.inherit(model)
        ctx.prepare(model)
        ctx.track(late=torch.optim.Adam(model.parameters()))

    assert run_alone(late, {}, solo(tmp_path, model_source=keeps), print).kind == "finished"
    assert keeps.warmed == ("0" * 64, [""], ["late"])

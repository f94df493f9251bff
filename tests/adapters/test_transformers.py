"""A script of Hugging Face's Trainer, with two lines changed, under kills; what is refused."""

import json
import math
import re
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer as _Trainer
from transformers import TrainerCallback, TrainerControl, TrainerState

from elastix.config import CheckpointConfig, Guard
from elastix.data.audit import audit
from elastix.data.cursor import count
from elastix.errors import ConfigError
from elastix.events import LoaderOpened, Reported, Resumed
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import run_local
from elastix.transformers import Trainer, TrainingArguments, _Progress, _slices
from tests.adapters import adapting
from tests.adapters.adapting import BATCH, EPOCHS, SAMPLES, Changed
from tests.adapters.transformers_tagger import LENGTH, Sentences, Tagger

LINES = {
    "from transformers import": "from elastix.transformers import",
    "trainer = Trainer(": "trainer = Trainer(ctx,",
}
SCRIPT = Changed("transformers_tagger.py", LINES)
STEPS = EPOCHS * -(-SAMPLES // BATCH)


def plain(events):
    """Trainer's loop in plain torch, over the batches that were committed."""
    torch.manual_seed(1)
    model = Tagger().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    training, testing = Sentences(SAMPLES, 7), Sentences(41, 8)
    losses, tested, now = [], [], 0

    def end(epoch):
        with torch.no_grad():
            tested.append([epoch, float(model(testing.words, testing.tags)["loss"])])

    for epoch, (batch,) in adapting.committed(events):
        while now < epoch:
            end(now)
            now += 1
        loss = model(training.words[batch], training.tags[batch])["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    end(now)
    return model, losses, tested


def test_a_script_of_trainers_ends_as_plain_torch_does_whoever_is_killed(tmp_path):
    assert SCRIPT.changed == 2
    out = tmp_path / "out"
    result, losses = adapting.run(SCRIPT, tmp_path, adapting.kills(), save=str(out))
    assert len(adapting.steps(result.events)) == STEPS
    model, trained, tested = plain(result.events)
    tensors = adapting.stored(result)
    assert adapting.equal(model, {n: tensors[n] for n in model.state_dict()}) <= 1e-5
    adapting.check_losses(losses, tested)
    told = [e.metrics for e in result.events if isinstance(e, Reported) and "loss" in e.metrics]
    assert [metrics["loss"] for metrics in told] == pytest.approx(trained, rel=1e-5)
    names = sorted(path.name for path in out.iterdir())
    assert names == [f"checkpoint-{STEPS - STEPS // EPOCHS}", f"checkpoint-{STEPS}", "final"]
    for saved in (out / f"checkpoint-{STEPS}", out / "final"):
        weights = load_file(saved / "model.safetensors")
        assert all(torch.equal(weights[n], tensors[n]) for n in model.state_dict())


def train(directory, workers, hits, **settings):
    (directory / "logs").mkdir(parents=True)
    config = {"log": str(directory / "logs"), **adapting.settings(epochs=2)}
    where = directory / "run"
    adapted = with_kills(SCRIPT, hits)
    return run_local(adapted, workers, config=config, directory=where, **settings)


def watched(ctx):
    """The script; and between which steps this worker was when, and in which epoch."""
    seen = []

    def at(phase, _):
        if phase == "boundary":
            seen.append([ctx.step, ctx._member._tracked.loaders[0].epoch])

    ctx.on_phase(at)
    SCRIPT(ctx)
    Path(ctx.config["log"], "boundaries").write_text(json.dumps(seen))


def test_who_was_there_for_a_whole_epoch_looks_for_one_more_step_as_a_joiner_does(tmp_path):
    """Trainer's loop counts, so only a joiner would: their States there have to be the same."""
    config = {"log": str(tmp_path), **adapting.settings(epochs=2)}
    run_local(watched, 1, config=config, directory=tmp_path / "run")
    seen = json.loads((tmp_path / "boundaries").read_text())
    last = STEPS // EPOCHS
    assert [place for place in seen if place[0] == last] == [[last, 0], [last, 1]]


@pytest.mark.slow
def test_when_all_are_killed_it_goes_on_in_the_middle_of_an_epoch(tmp_path):
    quiet = train(tmp_path / "quiet", 1, [])
    checkpoint = CheckpointConfig(every_steps=5, wait=True)
    hits = [Kill(worker=0, phase="bucket", step=12)]
    result = train(tmp_path / "fire", 1, hits, replace=True, checkpoint=checkpoint)
    assert [event.step for event in result.events if isinstance(event, Resumed)] == [10]
    ours, theirs = adapting.stored(result), adapting.stored(quiet)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    told = [
        [e.metrics for e in run.events if isinstance(e, Reported) and "grad_norm" in e.metrics][-8:]
        for run in (quiet, result)
    ]
    assert told[0] == told[1]  # its counters came with the State


@pytest.mark.slow
def test_exact_runs_end_with_the_same_bits_for_any_number_of_workers(tmp_path):
    quiet = train(tmp_path / "quiet", 1, [], exact=True)
    hits = [Kill(worker=1, phase="bucket", step=4)]
    result = train(tmp_path / "fire", 2, hits, exact=True)
    ours, theirs = adapting.stored(result), adapting.stored(quiet)
    assert set(result.lost) == {1}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ------------------------------------------------------------ other losses, other ends


class Classifier(torch.nn.Module):
    """Its loss is a mean, although Trainer offers it a number to divide by."""

    def __init__(self, penalty=0.0):
        super().__init__()
        self.head = torch.nn.Linear(LENGTH, 3)
        self.penalty = penalty

    def forward(self, input_ids, labels, num_items_in_batch=None, **_):
        logits = self.head(input_ids.double())
        tags = labels.clamp(min=0)[:, 0]
        loss = F.cross_entropy(logits, tags)
        if self.penalty:  # a part of the loss is divided by that number, and a part is not
            loss = F.cross_entropy(logits, tags, reduction="sum") / num_items_in_batch
            loss = loss + self.penalty * logits.pow(2).mean()
        return {"loss": loss, "logits": logits}


def trainer(ctx, *, model=None, data=None, kind=Trainer, more=(), **settings):
    torch.manual_seed(1)
    settings = {
        "per_device_train_batch_size": BATCH,
        "output_dir": tempfile.gettempdir(),  # Trainer makes it, and writes nothing there
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        **settings,
    }
    model = Classifier().double() if model is None else model
    data = Sentences(SAMPLES, 7) if data is None else data
    args = TrainingArguments(**settings)
    return kind(ctx, model=model, args=args, train_dataset=data, callbacks=list(more))


def saving_beside_checkpoints(ctx):
    out = ctx.config["out"]
    own = trainer(ctx, output_dir=out, save_strategy="epoch", num_train_epochs=1)
    own.train()
    Path(out, "mine.txt").write_text("mine")
    own.save_model()
    own.save_model()


def test_a_model_that_is_saved_leaves_all_else_in_its_directory(tmp_path):
    out = tmp_path / "out"
    config = {"out": str(out)}
    where = tmp_path / "run"
    run_local(saving_beside_checkpoints, 1, config=config, directory=where)
    names = sorted(path.name for path in out.iterdir())
    checkpoint = f"checkpoint-{STEPS // EPOCHS}"
    assert names == [checkpoint, "mine.txt", "model.safetensors", "training_args.bin"]


class StopsEarly(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_training_stop or state.global_step == 11


def stopping(ctx):
    settings = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    settings |= {"num_train_epochs": 3, "logging_steps": 1, "include_num_input_tokens_seen": "all"}
    settings |= {"data_seed": 11}
    trainer(ctx, more=[StopsEarly()], **settings).train()


def test_a_loss_that_is_a_mean_stays_one_and_a_callback_ends_the_run(tmp_path):
    result = run_local(stopping, 2, directory=tmp_path / "run")
    torch.manual_seed(1)
    model, data, losses = Classifier().double(), Sentences(SAMPLES, 7), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for _, (batch,) in adapting.committed(result.events):
        loss = model(data.words[batch], data.tags[batch])["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += len(batch) * LENGTH
    told = [e.metrics for e in result.events if isinstance(e, Reported) and "loss" in e.metrics]
    assert [metrics["loss"] for metrics in told] == pytest.approx(losses, rel=1e-6)
    assert (len(losses), told[-1]["num_input_tokens_seen"]) == (11, seen)
    assert [e.seed for e in result.events if isinstance(e, LoaderOpened)] == [11]
    assert told[-1]["epoch"] == pytest.approx(1 + 2 / 9)
    tensors = adapting.stored(result)
    assert adapting.equal(model, {n: tensors[n] for n in model.state_dict()}) <= 1e-6


class OwnMean(Trainer):
    """Its loss is a mean, although the model's could be divided by all items of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**inputs)["logits"].flatten(0, 1)
        return F.cross_entropy(logits, inputs["labels"].flatten())


class OwnMeanOfParts(OwnMean):
    loss_is_scaled_for_ga = False


class TwiceDivided(Trainer):
    loss_is_scaled_for_ga = False


def scaled(kind, ctx):
    """Trainer's own if there is no ctx; then `kind` has no first argument."""
    torch.manual_seed(1)
    settings = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    settings |= {"max_steps": 5, "logging_steps": 1, "max_grad_norm": 0.0}
    model, data = Tagger().double(), Sentences(96, 7)
    made = trainer(ctx, model=model, data=data, kind=kind, **settings)
    made.train()
    return made


def of_one(kind, ctx):
    scaled(kind, ctx)


@pytest.mark.fast("OwnMean", "TwiceDivided")
@pytest.mark.parametrize("kind", [OwnMean, OwnMeanOfParts, TwiceDivided])
def test_a_loss_is_scaled_as_trainer_itself_scales_it(tmp_path, kind):
    """Trainer adds up what compute_loss gives for each part, unless it is told otherwise."""
    result = run_local(partial(of_one, kind), 2, directory=tmp_path / "run")
    order = torch.cat([batch for _, (batch,) in adapting.committed(result.events)]).tolist()
    own = {name: getattr(kind, name) for name in ("loss_is_scaled_for_ga", "compute_loss")}
    if kind is TwiceDivided:
        del own["compute_loss"]
    theirs = type("Theirs", (_Trainer,), {**own, "_get_train_sampler": lambda *_: order})
    peer = scaled(lambda _, **settings: theirs(**settings), None)
    told = [e.metrics for e in result.events if isinstance(e, Reported) and "loss" in e.metrics]
    logged = [entry["loss"] for entry in peer.state.log_history if "loss" in entry]
    assert [metrics["loss"] for metrics in told] == pytest.approx(logged, rel=1e-5)
    tensors = adapting.stored(result)
    assert adapting.equal(peer.model, {n: tensors[n] for n in peer.model.state_dict()}) <= 1e-12


# ------------------------------------------------------------ steps that the group takes back


class Poisoned(Trainer):
    """Its loss is no number in one step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        bad = self._loader.drawn == 6 and self._script.ctx.step == 5
        return loss * math.nan if bad else loss


def of_two_epochs(kind, ctx):
    """Eight steps each; Trainer's own if there is no ctx."""
    torch.manual_seed(1)
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    settings |= {"num_train_epochs": 2, "logging_steps": 1, "lr_scheduler_type": "cosine"}
    settings |= {"learning_rate": 0.05, "disable_tqdm": True}
    made = trainer(ctx, model=Tagger().double(), data=Sentences(96, 7), kind=kind, **settings)
    made.train()
    if ctx is not None:
        ctx.report(steps=made.state.global_step)
    return made


BACK = {
    "rollback": (Kill(worker=1, phase="bucket", step=4), {"recovery": "rollback"}),
    "flip": (Flip(worker=2, tensor="head.weight", step=5), {}),
}


@pytest.mark.fast("flip")
@pytest.mark.parametrize("name", BACK)
def test_a_step_that_is_done_again_is_one_step_to_trainer(tmp_path, name):
    """It counts its steps, and would end each epoch that is one longer without its last batch."""
    harm, settings = BACK[name]
    train = with_kills(partial(of_two_epochs, Trainer), [harm])
    result = run_local(train, 3, directory=tmp_path / "run", **settings)
    assert set(result.lost) == {harm.worker}
    account = audit(result.events)
    assert account.exact
    assert (account.steps, account.loaders[0].epochs) == (16, 2)
    orders = {}
    for epoch, (batch,) in adapting.committed(result.events):
        orders.setdefault(epoch, []).extend(batch.tolist())
    epochs = iter(orders.values())
    theirs = type("Theirs", (_Trainer,), {"_get_train_sampler": lambda *_: Order(epochs)})
    peer = of_two_epochs(lambda _, **settings: theirs(**settings), None)
    tensors = adapting.stored(result)
    assert adapting.equal(peer.model, {n: tensors[n] for n in peer.model.state_dict()}) <= 1e-12
    told = [e.metrics for e in result.events if isinstance(e, Reported)]
    logged = [entry["loss"] for entry in peer.state.log_history if "loss" in entry]
    assert [m["loss"] for m in told if "loss" in m] == pytest.approx(logged, rel=1e-5)
    assert told[-1]["steps"] == 16


class Order:
    """Of each epoch in turn."""

    def __init__(self, epochs):
        self.epochs = epochs

    def __len__(self):
        return 96

    def __iter__(self):
        return iter(next(self.epochs))


def test_a_batch_that_the_guard_leaves_out_is_no_step_to_trainer(tmp_path):
    train = partial(of_two_epochs, Poisoned)
    result = run_local(train, 2, directory=tmp_path / "run", guard=Guard(most=1))
    account = audit(result.events)
    assert account.exact
    assert count(account.loaders[0].left_out) == 12
    assert account.steps == 15
    told = [e.metrics for e in result.events if isinstance(e, Reported)]
    assert all(math.isfinite(metrics["loss"]) for metrics in told if "loss" in metrics)
    assert told[-1]["steps"] == 15


class AtEnd:
    """A loader whose epoch had no batch left when this worker entered."""

    drawn, place = 0, 1.0

    def come_to_end(self):
        pass


def joiner(stops, evaluated):
    """What a joiner's Trainer is, as far as its progress is concerned."""
    made = Trainer.__new__(Trainer)
    made.args = TrainingArguments("x", use_cpu=True)
    made.state, made.control, made.current_flos = TrainerState(), TrainerControl(), 0.0
    made.callback_handler = SimpleNamespace(callbacks=[])
    made._loader = AtEnd()
    made._progress = _Progress(made)
    told = {**made._progress.state_dict(), "stops": stops, "evaluated_on_start": evaluated}
    made._progress.load_state_dict(told)
    return made


@pytest.mark.parametrize("stops", [False, True])
def test_who_joins_where_an_epoch_ends_stops_if_a_callback_of_the_others_said_so(stops):
    made = joiner(stops, evaluated=False)
    made.state.max_steps = 27
    made.control.should_training_stop = True  # as Trainer says where there was no batch
    made._progress.on_epoch_end(made.args, made.state, made.control)
    assert made.control.should_training_stop is stops
    assert made._progress.state_dict()["stops"] is stops  # and the next joiner


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_joiner_does_not_evaluate_on_start_once_more(evaluated, monkeypatch):
    """Callbacks count evaluations, and their counts are compared."""
    monkeypatch.setattr(_Trainer, "_evaluate", lambda *_: {"eval_loss": 1.0})
    made = joiner(stops=False, evaluated=evaluated)
    assert made._evaluate(None, None, skip_scheduler=True) == (
        {} if evaluated else {"eval_loss": 1.0}
    )
    assert made._evaluate(None, None, skip_scheduler=True) == {}
    assert made._evaluate(None, None) == {"eval_loss": 1.0}


# ------------------------------------------------------------ what cannot be said is refused


@pytest.mark.parametrize(
    ("accumulation", "batch", "slices"), [(4, 32, 4), (1, 32, 8), (1, 12, 6), (1, 1, 1), (3, 3, 3)]
)
def test_a_batch_is_cut_as_it_is_accumulated_or_into_at_most_eight(accumulation, batch, slices):
    assert _slices(accumulation, batch) == slices


class Drawn(IterableDataset):
    def __iter__(self):
        yield Sentences(1, 7)[0]


class Own(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, 4)


class Twice:
    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return 2 * len(self.loader)

    def __iter__(self):
        yield from self.loader
        yield from self.loader


class Around(Trainer):
    def get_train_dataloader(self):
        return Twice(super().get_train_dataloader())


class TwoPasses(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, False, num_items_in_batch) / 2
        self.accelerator.backward(loss, retain_graph=True)
        return loss


class OneAfterTheOther(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, dict(inputs), num_items_in_batch)


class MeanOfTokens(Tagger):
    def forward(self, input_ids, labels):
        out = super().forward(input_ids, labels)
        loss = F.cross_entropy(out["logits"].flatten(0, 1), labels.flatten())
        return {**out, "loss": loss}


class Normalised(Classifier):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(LENGTH)


class Contrasting(Classifier):
    """The loss of each sample depends on the others in its batch."""

    def forward(self, input_ids, labels=None):
        seen = self.head(input_ids.double())
        loss = F.cross_entropy(seen @ seen.T, torch.arange(len(seen)))
        return {"loss": loss, "logits": seen}


def penalised(ctx):
    trainer(ctx, model=Classifier(penalty=0.1).double()).train()


REFUSED = [
    (lambda ctx: trainer(ctx, load_best_model_at_end=True, eval_strategy="no"), "keep_best"),
    (lambda ctx: trainer(ctx, auto_find_batch_size=True), "Choose one"),
    (lambda ctx: trainer(ctx, save_on_each_node=True), "written once"),
    (lambda ctx: trainer(ctx, optim="lomo"), "within the backward pass"),
    (lambda ctx: trainer(ctx, per_device_train_batch_size=11), "gradient_accumulation_steps for"),
    (lambda ctx: trainer(ctx, per_device_train_batch_size=0), "a whole number >= 1"),
    (lambda ctx: trainer(ctx, gradient_accumulation_steps=-1), "a whole number >= 1"),
    (lambda ctx: trainer(ctx, num_train_epochs=math.nan), "num_train_epochs must be"),
    (
        lambda ctx: trainer(
            ctx, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}}
        ),
        "Say it as gradient_accumulation_steps",
    ),
    (lambda ctx: Trainer(ctx, modl=Classifier()), "Did you mean 'model'?"),
    (lambda ctx: Trainer(ctx, Classifier(), {"output_dir": "x"}), "args must be a Training"),
    (lambda ctx: trainer(ctx).train(resume_from_checkpoint="x"), "by itself"),
    (lambda ctx: trainer(ctx).hyperparameter_search(), "elastix.Campaign"),
    (lambda ctx: trainer(ctx).save_model("x"), "before a loader was used"),
    (lambda ctx: trainer(ctx, data=Drawn(), max_steps=2).train(), "iterable"),
    (
        lambda ctx: trainer(ctx, train_sampling_strategy="group_by_length").train(),
        "LengthGroupedSampler",
    ),
    (lambda ctx: trainer(ctx, kind=Own).train(), "get_train_dataloader"),
    (lambda ctx: trainer(ctx, kind=Around).train(), "get_train_dataloader"),
    (penalised, "another one is not"),
    (lambda ctx: trainer(ctx, kind=TwoPasses).train(), "within compute_loss"),
    (
        lambda ctx: trainer(ctx, model=MeanOfTokens().double()).train(),
        "put together from two parts",
    ),
    (lambda ctx: trainer(ctx, model=Contrasting().double()).train(), "put together from two parts"),
    (lambda ctx: trainer(ctx, model=Normalised().double()).train(), "BatchNorm1d would see one"),
    (
        lambda ctx: trainer(ctx, kind=OneAfterTheOther).train(),
        "override compute_loss",
    ),  # in a group
]


def all_refused(ctx):
    """One after the other in one worker; the last of them has entered the group."""
    for call, says in REFUSED:
        with pytest.raises(ConfigError, match=re.escape(says)):
            call(ctx)
    raise ConfigError("all were refused")


def test_what_trainer_alone_can_do_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="all were refused"):
        run_local(all_refused, 1, directory=tmp_path / "run")
    with pytest.raises(ConfigError, match=re.escape("train(ctx)")):
        Trainer(None)
    with pytest.raises(ConfigError, match="Trainer needs ctx"):
        Trainer(model=Classifier())

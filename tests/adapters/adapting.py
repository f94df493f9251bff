"""Scripts of peers, run by elastix with two lines changed, and what plain torch makes of it."""

import json
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastix.data.audit import audit
from elastix.data.sample_order import indices
from elastix.events import LoaderOpened, StateStored, StepCommitted
from elastix.store import Store
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.trainables import usher

HERE = Path(__file__).parent
SAMPLES, BATCH, EPOCHS = 97, 12, 5
PHASES = ("batch", "bucket", "filled", "round", "boundary")
USHERS = {3: 8, 4: 14, 5: 22, 6: 30}
"""By newcomer, after how many steps the group begins to wait for it, see tests.trainables.usher."""


def kills(steps=(2, 6, 12, 20, 28)):
    """Five: two founders of three, and three of those that came in their place."""
    return [
        Kill(worker=worker, phase=phase, step=step)
        for worker, phase, step in zip((0, 1, 3, 4, 5), PHASES, steps, strict=True)
    ]


@dataclass(frozen=True)
class Changed:
    """A script with some of its lines changed, as a train function.

    Attributes:
        script: file beside this one, or anywhere, with a function of its settings.
        lines: old to new; `ctx` is there.
        around: calls the script's function, if the peer does so and not the script.
        function: its name.
    """

    script: str
    lines: Mapping[str, str]
    around: Callable[[Callable[[Any], None], Any, Any], None] | None = None
    function: str = "run"

    @property
    def source(self) -> str:
        text = (HERE / self.script).read_text()
        for old, new in self.lines.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text

    @property
    def changed(self) -> int:
        """How many lines differ."""
        before = (HERE / self.script).read_text().splitlines()
        after = self.source.splitlines()
        return sum(old != new for old, new in zip(before, after, strict=True))

    def __call__(self, ctx) -> None:
        if ctx.config.get("ushers"):
            usher_in(ctx)
        names = {"__name__": "adapted", "ctx": ctx}
        exec(compile(self.source, str(HERE / self.script), "exec"), names)
        settings = {**ctx.config, "losses": []}
        if self.around is None:
            names[self.function](settings)
        else:
            self.around(names[self.function], settings, ctx)
        (Path(ctx.config["log"]) / f"{ctx.worker}.json").write_text(json.dumps(settings["losses"]))


def usher_in(ctx):
    """The founder that is never killed, who gives newcomers the State, waits for what they need."""

    def at(phase, _):
        for newcomer, since in USHERS.items() if phase == "boundary" else ():
            if ctx.worker in (2, newcomer) and ctx.step >= since:
                usher(ctx, newcomer)

    ctx.on_phase(at)


@contextmanager
def warm(*modules):
    """Workers are forked from a server that has imported these."""
    server = forkserver._forkserver
    before = server._preload_modules
    server._stop()
    server.set_forkserver_preload([*modules, *before])
    try:
        yield
    finally:
        server._stop()
        server.set_forkserver_preload(before)


def run(train, directory, hits, **config):
    """Three workers, those that are lost replaced; the run, and what each left wrote down."""
    logs = directory / "logs"
    logs.mkdir(parents=True)
    result = run_local(
        with_kills(train, hits),
        3,
        config={
            "log": str(logs),
            "meeting": str(logs),
            "ushers": bool(hits),
            **settings(),
            **config,
        },
        directory=directory / "run",
        replace=True,
    )
    assert set(result.lost) == {kill.worker for kill in hits}
    assert audit(result.events).exact
    shares = [batch.shares for event in steps(result.events) for batch in event.batches]
    assert not hits or {worker for share in shares for worker in share} > {0, 1, 2}
    losses = {int(path.stem): json.loads(path.read_text()) for path in logs.glob("*.json")}
    return result, losses


def settings(**others):
    return {
        "samples": SAMPLES,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "lr": 1e-2,
        "save": "",
        "accumulate": 1,
        **others,
    }


def steps(events):
    return [event for event in events if isinstance(event, StepCommitted)]


def committed(events):
    """Of each step: its epoch, and the dataset indices of each of its batches."""
    opened = next(event for event in events if isinstance(event, LoaderOpened))
    for event in steps(events):
        batches = []
        for batch in event.batches:
            spans = sorted(span for share in batch.shares.values() for span in share)
            found = indices(spans, opened.seed, opened.length, opened.shuffle)
            batches.append(torch.from_numpy(found))
        yield event.batches[0].epoch, batches


def plain(events, build, data):
    """The scripts' loop in plain torch, over the batches that were committed: model and losses."""
    torch.manual_seed(1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    x, y = data(SAMPLES, 7).tensors
    test_x, test_y = data(41, 8).tensors
    losses, now = [], 0

    def end(epoch):
        with torch.no_grad():
            losses.append([epoch, float(F.cross_entropy(model(test_x), test_y))])
        scheduler.step()

    for epoch, (batch,) in committed(events):
        while now < epoch:
            end(now)
            now += 1
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    end(now)
    return model, losses


def stored(result):
    """Tensors of the last State."""
    with Store(result.directory / "store", read_only=True) as store:
        last = [event for event in result.events if isinstance(event, StateStored)][-1]
        return dict(store.get(last.ref).clone().tensors)


def equal(ours: nn.Module, theirs: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of their tensors, relative to the largest value of each."""
    return max(
        float((ours.state_dict()[name] - tensor).abs().max() / tensor.abs().max())
        for name, tensor in theirs.items()
        if tensor.is_floating_point()
    )


def check_losses(losses, expected):
    """A founder that is there all the time has every epoch's; the others have its last ones."""
    epochs, values = zip(*losses[2], strict=True)
    assert list(epochs) == [epoch for epoch, _ in expected]
    assert list(values) == pytest.approx([value for _, value in expected], rel=1e-5)
    for own in losses.values():
        assert own == losses[2][len(losses[2]) - len(own) :]

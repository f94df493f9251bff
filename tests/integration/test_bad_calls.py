"""What a train function can get wrong: said at the call, in words, and nothing hangs.

On processes without Ray; that the same comes out of `fit` is shown in test_trainer.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

from elastix.errors import ConfigError
from elastix.testing.local import run_local
from tests import trainables


def strange_optimizer(ctx):
    model = torch.nn.Linear(4, 3)
    ctx.prepare(model, torch.optim.SGD(torch.nn.Linear(4, 3).parameters(), lr=0.1))


def tracked_stranger(ctx):
    ctx.prepare(torch.nn.Linear(4, 3))
    ctx.track(head=torch.optim.SGD(torch.nn.Linear(4, 3).parameters(), lr=0.1))


def tracked_too_early(ctx):
    ctx.track(head=torch.optim.SGD(torch.nn.Linear(4, 3).parameters(), lr=0.1))
    ctx.prepare(torch.nn.Linear(4, 3))


def added_later(ctx):
    model = torch.nn.Linear(4, 3)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, 4))]})
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(10)


def no_length(ctx):
    ctx.prepare(torch.nn.Linear(4, 3))
    ctx.loader(Stream(), batch_size=8)


def small_batch(ctx):
    ctx.prepare(torch.nn.Linear(4, 3))
    ctx.loader(trainables.samples(20), batch_size=1)


def loader_first(ctx):
    ctx.loader(trainables.samples(20), batch_size=4)


def in_plain_torch(ctx):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def epoch_as_a_batch(ctx):
    ctx.prepare(torch.nn.Linear(4, 3))
    for _inputs, _targets in ctx.loader(trainables.samples(20), batch_size=4).epochs(2):
        pass


def frozen(ctx):
    ctx.prepare(torch.nn.Linear(4, 3).requires_grad_(False))


class InAList(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [torch.nn.Linear(4, 3)]


def layers_in_a_list(ctx):
    ctx.prepare(InAList())


@pytest.mark.parametrize(
    ("train", "fact"),
    [
        (strange_optimizer, r"parameter 0 of group 0 of the SGD, shape \(3, 4\), belongs to no"),
        (tracked_stranger, r"parameter 0 of group 0 of the SGD, .* Nothing was tracked"),
        (tracked_too_early, r"parameter 0 of group 0 of the SGD, .* Nothing was prepared"),
        (in_plain_torch, "without ctx.prepare, so the workers never formed a group"),
        (epoch_as_a_batch, "an epoch was unpacked as if it were a batch. Nothing was read"),
        (added_later, r"parameter 0 of group 1 of the SGD, .* No step was taken"),
        (no_length, "Stream has no length"),
        (small_batch, "a global batch of 1 cannot be split over 2 workers"),
        (loader_first, "ctx.loader was called before ctx.prepare"),
        (frozen, "no parameter of the prepared model requires a gradient"),
        (layers_in_a_list, r"has no parameters\. .* a plain list or dict are unknown to torch"),
    ],
)
def test_bad_calls_on_the_context(tmp_path, train, fact):
    with pytest.raises(ConfigError, match=fact):
        run_local(train, 2, directory=tmp_path)


def late_optimizer(ctx):
    model = torch.nn.Linear(4, 3)
    ctx.prepare(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


class Keeper:
    """Has an optimizer of its own, and its state."""

    def __init__(self, model):
        self.optimizers = [torch.optim.Adam(model.parameters())]

    def state_dict(self):
        return self.optimizers[0].state_dict()

    def load_state_dict(self, values):
        self.optimizers[0].load_state_dict(values)


def kept_optimizers(ctx):
    model = torch.nn.Linear(4, 3)
    ctx.prepare(model)
    ctx.track(second=torch.optim.SGD(model.parameters(), lr=0.1), keeper=(keeper := Keeper(model)))
    latent = torch.nn.Parameter(torch.ones(2, 4))
    of_its_own = torch.optim.SGD([latent], lr=0.1)
    for optimizer in (*keeper.optimizers, of_its_own):
        model(latent).sum().backward()
        optimizer.step()


def test_an_optimizer_that_no_joiner_would_have_takes_no_step(tmp_path):
    with pytest.raises(ConfigError, match=r"\(Adam\) that was not .* ctx.track\(optimizer2="):
        run_local(late_optimizer, 2, directory=tmp_path)


def test_an_optimizer_may_be_tracked_by_itself_or_with_its_keeper_or_train_something_else(tmp_path):
    assert len(run_local(kept_optimizers, 2, directory=tmp_path).outcomes) == 2


@pytest.mark.fast("None")
@pytest.mark.parametrize("crew", [None, {"shard": 2}])
def test_a_script_that_runs_when_it_is_imported_is_told_what_to_do(tmp_path, crew):
    """By the error that ends it: what several workers print at once is mixed up."""
    script = tmp_path / "script.py"
    script.write_text(
        "from elastix.testing.local import run_local\n"
        "from tests import trainables\n"
        f"run_local(trainables.train, 3, crew={crew})\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONUNBUFFERED": "1",
    }
    ended = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("elastix.errors.ConfigError: run_local was called while"), ended.stderr
    assert 'if __name__ == "__main__":' in said


def test_a_process_of_somebody_else_that_imports_the_script_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from elastix.testing.local import run_local\n"
        "from tests import trainables\n"
        "if __name__ == '__main__':\n"
        "    other = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    other.start()\n"
        "    other.join()\n"
        "    raise SystemExit(other.exitcode)\n"
        "run_local(trainables.train, 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ended = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("elastix.errors.ConfigError: run_local was called while"), ended.stderr

"""Trials that do what no train function should: the campaign goes on, and its tables are true."""

import copy
import gc
import io
import logging
import logging.config
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.modules.module as every_module
import torch.optim.optimizer as every_optimizer
from ConfigSpace import ConfigurationSpace
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import elastix
from elastix.errors import NotFound
from elastix.search.executors import outside_generators, process_settings
from elastix.search.executors.serial import Local
from elastix.search.results import Best, Results
from elastix.search.trial import Objectives, Suggestion, Trial, TrialState
from elastix.state import Ref
from elastix.store import Store

SPACE = ConfigurationSpace({"x": (0.0, 1.0)})
LOGGER = logging.getLogger(__name__)
ENTERED = []


def search(store, train, trials=3, metric="m"):
    return elastix.Campaign(
        train,
        space=SPACE,
        metric=metric,
        budget=elastix.Budget(trials=trials),
        run=elastix.RunConfig(name="odd", store=str(store)),
        executor=Local(),
        quiet=True,
    ).run()


def test_campaigns_one_after_the_other_keep_no_store_open(tmp_path):
    """A study of a hundred seeds, each with a store of its own, ran out of file descriptors."""

    def train(ctx):
        model = torch.nn.Linear(1, 1)
        ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ctx.report(m=ctx.config["x"])

    open_files = []
    for number in range(3):
        search(tmp_path / f"store-{number}", train, trials=1)
        open_files.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    assert open_files[1] == open_files[2]


@pytest.mark.parametrize("name", ["scaling", "checkpoint"])
def test_what_an_executor_would_not_hear_of_is_refused(tmp_path, name):
    """It has workers of its own: four of them, say, were asked for in vain."""
    given = {"scaling": elastix.ScalingConfig(num_workers=4)}
    given["checkpoint"] = elastix.CheckpointConfig()
    with pytest.raises(elastix.ConfigError, match="an executor has its own"):
        elastix.Campaign(
            print, space=SPACE, metric="m", budget=elastix.Budget(trials=1), executor=Local(),
            **{name: given[name]},
        )  # fmt: skip


def test_campaigns_in_two_threads_take_turns(tmp_path):
    """Each drew the other's random numbers, and put the other's settings back."""
    begun, threads, overlapped = threading.Event(), [], []

    def second(ctx):
        begun.set()
        ctx.report(m=1.0)

    def first(ctx):
        other = threading.Thread(target=search, args=(tmp_path / "second", second, 1))
        other.start()
        threads.append(other)
        overlapped.append(begun.wait(1.0))
        ctx.report(m=1.0)

    def nested(ctx):
        ctx.report(m=search(tmp_path / "nested", second, 1).best.values["m"])

    search(tmp_path / "first", first, 1)
    threads[0].join()
    assert overlapped == [False]
    assert begun.is_set()
    assert [trial.state for trial in search(tmp_path / "outer", nested, 1)] == ["finished"]


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")


def nothing_to_say():
    raise Silent


@pytest.mark.parametrize(
    "odd",
    [
        lambda: 10**400,
        lambda: -(10**400),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: np.array([1.0, 2.0]),
        lambda: torch.tensor(1 + 2j),
        lambda: np.datetime64("2020-01-01"),
        lambda: 1j,
        lambda: Fraction(1, 3),
        lambda: float("nan"),
        nothing_to_say,
    ],
)
def test_a_trial_with_an_odd_end_fails_alone(tmp_path, odd):
    def train(ctx):
        ctx.report(m=1.0 if ctx.config["x"] > 0.5 else odd())

    def bad(trial):
        return trial.config["x"] <= 0.5

    results = search(tmp_path, train, 8)
    assert 0 < sum(map(bad, results)) < 8
    assert all((trial.state == "failed") == bad(trial) for trial in results)
    assert elastix.Results.open(tmp_path, "odd").best.values == {"m": 1.0}


def test_what_a_train_function_does_to_its_config_is_not_what_was_tried(tmp_path):
    def train(ctx):
        ctx.report(m=ctx.config["x"])
        ctx.config["x"] = 77.0

    results = search(tmp_path, train)
    assert [trial.config["x"] for trial in results] == [trial.metrics["m"] for trial in results]


def test_a_trial_that_changes_its_working_folder_leaves_the_next_one_its_own(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    (here / "data").write_text("1")
    begun = []

    def train(ctx):
        begun.append(Path.cwd())
        model = torch.nn.Linear(2, 2)
        ctx.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        ctx.report(m=float(Path("data").read_text()) + ctx.config["x"])
        os.chdir(there)
        if ctx.config["x"] < 0.5:
            raise ValueError("elsewhere")

    results = search("runs/store", train, 8)
    assert begun == [here] * 8
    assert Path.cwd() == here
    assert list(there.iterdir()) == []
    assert results.best.load().tensors
    assert {t.state for t in results} == {"finished", "failed"}


class Watching(TorchDispatchMode):
    """As profilers and counters of operators are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def enter(context):
    """And never leave it."""
    ENTERED.append(context)
    context.__enter__()


def flag(of, name, value=None):
    """How it is read, and changed: to the opposite, if no value is given."""

    def change():
        setattr(of, name, not getattr(of, name) if value is None else value)

    return partial(getattr, of, name), change


@pytest.mark.parametrize(
    ("get", "change"),
    [
        (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
        (torch.get_default_device, lambda: torch.set_default_device("meta")),
        (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
        (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("warn")),
        (torch.is_anomaly_enabled, lambda: torch.set_anomaly_enabled(True)),
        (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
        *(flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
        flag(torch.backends.cudnn, "allow_tf32"),
        *(flag(torch.backends.mkldnn, name) for name in ("enabled", "deterministic")),
        (
            partial(torch.is_autocast_enabled, "cpu"),
            partial(torch.set_autocast_enabled, "cpu", True),
        ),
        (
            partial(torch.get_autocast_dtype, "cpu"),
            partial(torch.set_autocast_dtype, "cpu", torch.float16),
        ),
        (lambda: (torch.tensor(1e-40) * 1).item(), partial(torch.set_flush_denormal, True)),
        (
            torch.backends.cuda.flash_sdp_enabled,
            lambda: torch.backends.cuda.enable_flash_sdp(False),
        ),
        (np.geterr, partial(np.seterr, all="raise")),
        (lambda: list(warnings.filters), partial(warnings.simplefilter, "error")),
        (
            lambda: list(logging.root.handlers),
            lambda: logging.root.addHandler(logging.NullHandler()),
        ),
        flag(logging.root, "level", 5),
        (
            partial(signal.getsignal, signal.SIGINT),
            partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
        ),
        (
            lambda: len(every_module._global_forward_hooks),
            lambda: every_module.register_module_forward_hook(lambda *_: None),
        ),
        (
            lambda: len(every_optimizer._global_optimizer_post_hooks),
            lambda: every_optimizer.register_optimizer_step_post_hook(lambda *_: None),
        ),
        (
            torch.sparse.check_sparse_tensor_invariants.is_enabled,
            torch.sparse.check_sparse_tensor_invariants.enable,
        ),
        (torch.is_inference_mode_enabled, lambda: enter(torch.inference_mode())),
        (
            lambda: (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
            lambda: enter(torch.autocast("cpu", torch.bfloat16)),
        ),
        (torch.get_default_device, lambda: enter(torch.device("meta"))),
        (lambda: len(_get_current_dispatch_mode_stack()), lambda: enter(Watching())),
        (
            lambda: torch.ones(1, requires_grad=True).exp().grad_fn._saved_result.item(),
            lambda: enter(saved_tensors_hooks(torch.clone, torch.zeros_like)),
        ),
        (gc.isenabled, gc.disable),
        (gc.get_threshold, lambda: gc.set_threshold(7, 7, 7)),
        (lambda: list(sys.path), lambda: sys.path.insert(0, "/of/the/trial")),
        (lambda: list(sys.path), lambda: setattr(sys, "path", ["/of/the/trial", *sys.path])),
        (lambda: sys.stdout, lambda: setattr(sys, "stdout", io.StringIO())),
        (
            partial(multiprocessing.get_start_method, allow_none=True),
            # By force: another test of this process may have set one.
            lambda: multiprocessing.set_start_method("spawn", force=True),
        ),
        (
            torch.distributed.is_initialized,
            lambda: torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            ),
        ),
        (
            lambda: list(LOGGER.handlers),
            lambda: LOGGER.addHandler(logging.NullHandler()),
        ),
        (
            lambda: logging.getLogger("elastix.search.campaign").disabled,
            partial(logging.config.dictConfig, {"version": 1}),
        ),
    ],
)
def test_what_a_trial_sets_in_its_process_is_not_so_for_the_next(tmp_path, get, change):
    """One that computes in float64, say, had all later ones of its worker do so."""
    before, begun = get(), []

    def train(ctx):
        begun.append(get())
        change()
        ctx.report(m=ctx.config["x"])
        if ctx.config["x"] < 0.5:
            raise ValueError("in the middle")

    try:
        search(tmp_path, train, 4)
        assert begun == [before] * 4
        assert get() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_deterministic_debug_mode("default")
        torch.set_anomaly_enabled(False)
        torch.set_float32_matmul_precision("highest")


def test_a_logger_forgets_what_it_was_not_to_log():
    """It keeps what it has found out about each level until it is told to ask again."""
    with process_settings.kept():
        logging.disable(logging.CRITICAL)
        assert not LOGGER.isEnabledFor(logging.ERROR)
    assert LOGGER.isEnabledFor(logging.ERROR)


def test_a_timer_that_a_trial_has_left_does_not_ring_in_the_next(tmp_path):
    """Its handler is put back, and the signal would end the process."""
    ours = signal.setitimer(signal.ITIMER_REAL, 0)  # of this test's timeout
    begun = []

    def train(ctx):
        begun.append(signal.getitimer(signal.ITIMER_REAL)[0])
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 60)
        ctx.report(m=1.0)

    try:
        search(tmp_path, train, 3)
        assert begun == [0.0] * 3
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *ours)


def test_what_a_trial_has_set_does_not_stay_with_what_it_imports_then(tmp_path, monkeypatch):
    """Filters of warnings and handlers were kept all together, with the trial's among them."""
    (tmp_path / "filters_of_the_user.py").write_text(
        "import logging, sys, warnings\n"
        "warnings.filterwarnings('ignore', 'of the module')\n"
        "logging.getLogger('of the module').setLevel(7)\n"
        "sys.path.append('/of/the/module')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(warnings.filters), list(sys.path)
    begun = []

    def train(ctx):
        level = logging.getLogger("of the module").level
        begun.append((list(warnings.filters), list(sys.path), len(LOGGER.handlers), level))
        warnings.simplefilter("error")
        sys.path.insert(0, "/of/the/trial")
        LOGGER.addHandler(logging.NullHandler())
        import filters_of_the_user  # noqa: F401

        ctx.report(m=1.0)

    try:
        search(tmp_path / "store", train, 3)
        assert begun[2] == begun[1]
        (ignored, *filters), path, handlers, level = begun[1]
        assert (ignored[0], filters) == ("ignore", begun[0][0])
        assert path == [*begun[0][1], "/of/the/module"]
        assert (handlers, level) == (0, 7)
    finally:
        warnings.filters[:] = before[0]
        sys.path[:] = before[1]
        sys.modules.pop("filters_of_the_user", None)


def test_what_a_module_sets_while_it_is_imported_stays(tmp_path, monkeypatch):
    """It is imported by the first trial of a worker, and the others ran without it."""
    (tmp_path / "of_the_user.py").write_text(
        "import os, torch, warnings\n"
        "os.environ['ELASTIX_TEST_IMPORTED'] = 'by the module'\n"
        "torch.set_default_dtype(torch.float64)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = []

    def train(ctx):
        torch.set_float32_matmul_precision("medium")
        import of_the_user  # noqa: F401

        there = os.environ.get("ELASTIX_TEST_IMPORTED"), torch.get_default_dtype()
        begun.append((*there, warnings.filters[0][0]))
        os.environ["ELASTIX_TEST_IMPORTED"] = "by the trial"
        warnings.simplefilter("error")
        ctx.report(m=1.0)

    try:
        search(tmp_path / "store", train, 3)
        assert set(begun) == {("by the module", torch.float64, begun[0][2])}
        assert os.environ["ELASTIX_TEST_IMPORTED"] == "by the module"
        assert torch.get_float32_matmul_precision() == "highest"
        assert "exec_module" not in vars(SourceFileLoader)
    finally:
        os.environ.pop("ELASTIX_TEST_IMPORTED", None)
        torch.set_default_dtype(torch.float32)
        sys.modules.pop("of_the_user", None)


def test_what_a_trial_sets_in_the_environment_is_not_so_for_the_next(tmp_path, monkeypatch):
    """The threads of a tokenizer, or the seed that a library reads there."""
    monkeypatch.setenv("ELASTIX_TEST_CHANGED", "was")
    monkeypatch.setenv("ELASTIX_TEST_GONE", "there")
    before, begun = dict(os.environ), []

    def train(ctx):
        begun.append(dict(os.environ))
        os.environ["ELASTIX_TEST_NEW"] = "new"
        os.environ["ELASTIX_TEST_CHANGED"] = "is"
        del os.environ["ELASTIX_TEST_GONE"]
        ctx.report(m=ctx.config["x"])
        if ctx.config["x"] < 0.5:
            raise ValueError("in the middle")

    try:
        search(tmp_path, train, 4)
        assert begun == [before] * 4
        assert dict(os.environ) == before
    finally:
        os.environ.pop("ELASTIX_TEST_NEW", None)


def shared_model(renew=lambda model: None):
    """A train function that finds its model outside of itself."""
    outside = torch.nn.Linear(1, 1)

    def train(ctx):
        before = outside.weight.item()
        renew(outside)
        model, optimizer = ctx.prepare(outside, torch.optim.SGD(outside.parameters(), lr=0.1))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        ctx.report(m=before)

    return train


def test_a_trial_does_not_go_on_from_what_another_has_trained(tmp_path):
    """It had the other's weights, and "none" of them was inherited."""
    first, *others = search(tmp_path, shared_model())
    assert first.state == "finished"
    for trial in others:
        assert trial.state == "failed"
        assert "'weight' is as an earlier trial of this process has left it" in trial.traceback


class Drawing:
    """A dataset with random numbers of its own."""

    of_all = random.Random(0)

    def __init__(self):
        self.random = np.random.default_rng(0)

    @staticmethod
    def static(generator=random.Random(0)):  # noqa: B008 - one for all calls
        return generator.random()

    @property
    def number(self):
        return OF_A_PROPERTY.random()

    def __getitem__(self, index):
        return self.random.random()


@dataclass(slots=True)
class Slotted:
    """An object without a __dict__."""

    random: np.random.Generator


OF_A_PROPERTY = random.Random(0)
OF_THE_SCRIPT = random.Random(0)


def of_the_script():
    return OF_THE_SCRIPT.random()


def drawing():
    """By name, what draws a number from a generator that stands outside of the train function."""
    of_torch, of_numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
    older, dataset, kept = np.random.RandomState(0), Drawing(), {"rng": [random.Random(0)]}
    slotted, bits = Slotted(np.random.default_rng(0)), np.random.PCG64(0)
    read_only = MappingProxyType({"rng": random.Random(0)})
    return {
        "static": lambda: dataset.static(),
        "property": lambda: dataset.number,
        "slots": lambda: slotted.random.random(),
        "bits": lambda: np.random.Generator(bits).random(),
        "read only": lambda: read_only["rng"].random(),
        "torch": lambda: torch.rand(1, generator=of_torch).item(),
        "numpy": lambda: of_numpy.random(),
        "RandomState": lambda: older.rand(),
        "dataset": lambda: dataset[0],
        "class": lambda: dataset.of_all.random(),
        "kept": lambda generators=kept: generators["rng"][0].gauss(0, 1),
        "script": of_the_script,
    }


@pytest.mark.parametrize("kind", drawing())
def test_a_generator_outside_begins_each_trial_as_the_first(tmp_path, kind):
    """A trial's score hung on how many its worker had run before it."""
    draw = drawing()[kind]

    def train(ctx):
        ctx.report(m=draw() + draw())
        if ctx.config["x"] < 0.5:
            raise ValueError("in the middle")

    trials = search(tmp_path, train, 8)
    assert len({str(trial.metrics["m"]) for trial in trials if trial.metrics}) == 1


@pytest.mark.parametrize(
    ("before", "within", "draws"),
    [
        ("import NAME.noise", "pass", "NAME.noise.RNG.random()"),
        ("import NAME.noise", "pass", "NAME.noise.draw()"),
        ("pass", "import NAME.noise as noise", "noise.draw()"),
        ("pass", "from NAME.noise import RNG", "RNG.random()"),
        ("import NAME.noise", "from NAME.noise import RNG", "RNG.random()"),
    ],
)
def test_a_generator_of_a_module_begins_each_trial_as_the_first(
    tmp_path, monkeypatch, request, before, within, draws
):
    name = f"package_{request.node.callspec.id.encode().hex()}"  # others are imported already
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "noise.py").write_text(
        "import random\nRNG = random.Random(0)\ndef draw():\n    return RNG.random()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    program = f"{before}\ndef train(ctx):\n    {within}\n    ctx.report(m={draws})\n"
    script = {"__name__": "script_of_the_user"}
    exec(program.replace("NAME", name), script)
    trials = search(tmp_path / "store", script["train"], 3)
    assert [trial.metrics["m"] for trial in trials] == [random.Random(0).random()] * 3


class Noise(torch.utils.data.Dataset):
    """Draws from the generator of the process that it is read in."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.rand(1).item()


def test_workers_of_a_loader_that_stay_end_with_the_trial(tmp_path):
    """They drew on where those of the trial before had stopped."""
    loader = torch.utils.data.DataLoader(Noise(), num_workers=1, persistent_workers=True)
    drawn = []

    def train(ctx):
        torch.manual_seed(0)
        drawn.append([batch.item() for _ in range(2) for batch in loader])
        ctx.report(m=1.0)

    search(tmp_path, train)
    assert drawn == drawn[:1] * 3
    assert loader._iterator is None


@pytest.mark.parametrize("shared", [{0: "a", 1: "b"}, {"a", "b"}])
def test_what_another_thread_changes_while_generators_are_looked_for_does_no_harm(shared):
    """A dictionary that grew in between ended the trial, or the import of a module."""
    parts = outside_generators._parts(shared)
    found = [next(parts)]
    shared.clear()
    assert sorted([*found, *parts]) == ["a", "b"]


def test_a_generator_that_takes_the_place_of_another_is_put_back_too(tmp_path, monkeypatch):
    """In a notebook, between two campaigns with one train function."""

    def train(ctx):
        ctx.report(m=of_the_script())

    search(tmp_path / "first", train)
    monkeypatch.setitem(globals(), "OF_THE_SCRIPT", random.Random(1))
    trials = search(tmp_path / "second", train)
    assert [trial.metrics["m"] for trial in trials] == [random.Random(1).random()] * 3


def test_each_trial_is_compiled_as_the_first(tmp_path):
    """All but the first were compiled for any shape."""
    shapes = iter(range(2, 13))
    begun = []

    def train(ctx):
        compiled = []

        def backend(graph, inputs):
            compiled.append(any(isinstance(one, torch.SymInt) for one in inputs))
            return graph.forward

        model = torch.compile(torch.nn.Linear(2, 2), backend=backend)
        model(torch.ones(next(shapes), 2))
        begun.append(compiled)
        ctx.report(m=1.0)

    search(tmp_path, train, 11)
    assert begun == [[False]] * 11


def hooks():
    return len(_global_optimizer_pre_hooks)


def test_nor_if_neither_is_given_to_ctx_prepare(tmp_path):
    """As loops of other libraries do it: an optimizer's first step tells what it trains."""
    outside, hooks_before = torch.nn.Linear(1, 1), hooks()

    def train(ctx):
        before = outside.weight.item()
        optimizer = torch.optim.SGD(outside.parameters(), lr=0.1)
        outside(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        ctx.report(m=before)

    first, *others = search(tmp_path, train)
    assert first.state == "finished"
    for trial in others:
        assert trial.state == "failed"
        assert "[1, 1] is as an earlier trial of this process has left it" in trial.traceback
    assert hooks() == hooks_before


class Meter:
    def __init__(self):
        self.state = {"steps": 0}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def used_outside(kind, anew=lambda made: None):
    """A train function that finds something beside its model outside of itself."""
    model = torch.nn.Linear(1, 1)
    begin = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = {
        "optimizer": lambda: optimizer,
        "scheduler": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "scaler": lambda: torch.amp.GradScaler("cpu", growth_interval=1),
        "average": lambda: torch.optim.swa_utils.AveragedModel(model),
        "meter": Meter,
    }[kind]()

    def train(ctx):
        model.load_state_dict(begin)
        anew(other)
        mine = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "optimizer":
            ctx.prepare(model, other)
        elif kind in ("average", "meter"):
            ctx.track(other=other)
            ctx.prepare(model, mine)
        else:
            ctx.prepare(model, mine, other)
        loss = model(torch.ones(1, 1)).sum()
        (other.scale(loss) if kind == "scaler" else loss).backward()
        if kind == "scaler":
            other.step(mine)
            other.update()
        else:
            (other if kind == "optimizer" else mine).step()
        if kind == "scheduler":
            other.step()
        if kind == "average":
            other.update_parameters(model)
        if kind == "meter":
            other.state["steps"] += 1
        ctx.report(m=1.0)

    return train


@pytest.mark.parametrize("kind", ["optimizer", "scheduler", "scaler", "average", "meter"])
def test_what_else_a_trial_has_used_is_no_beginning_of_the_next(tmp_path, kind):
    """Moments, rates, scales and averages passed on, though the model had begun anew."""
    first, *others = search(tmp_path, used_outside(kind))
    assert first.state == "finished", first.traceback
    for trial in others:
        assert trial.state == "failed"
        assert "earlier trial of this process has left it" in trial.traceback


@pytest.mark.parametrize(
    ("kind", "anew"),
    [
        ("optimizer", lambda optimizer: optimizer.state.clear()),
        ("meter", lambda meter: meter.load_state_dict({"steps": 0})),
        ("average", lambda average: average.load_state_dict(copy.deepcopy(average.first))),
    ],
)
def test_but_one_that_begins_anew_may_be_used_again(tmp_path, kind, anew):
    def renew(other):
        if kind == "average" and not hasattr(other, "first"):
            other.first = copy.deepcopy(other.state_dict())
        anew(other)

    trials = search(tmp_path, used_outside(kind, renew))
    assert {trial.state for trial in trials} == {"finished"}, trials[1].traceback


@pytest.mark.parametrize(
    "renew",
    [
        lambda model: model.reset_parameters(),
        lambda model: model.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.ones(1)}),
        lambda model: [parameter.data.normal_() for parameter in model.parameters()],
    ],
)
def test_a_model_with_a_beginning_of_its_own_is_as_good_as_new(tmp_path, renew):
    results = search(tmp_path, shared_model(renew))
    assert {trial.state for trial in results} == {"finished"}


@pytest.mark.parametrize("inference", [False, True])
def test_what_no_trial_changes_may_be_shared(tmp_path, inference):
    with torch.inference_mode(inference):
        backbone = torch.nn.Linear(2, 2)  # trainable, and in no optimizer
    if inference:
        backbone.requires_grad_(requires_grad=False)

    def train(ctx):
        head = torch.nn.Linear(2, 1)
        model = torch.nn.Sequential(backbone, head)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(head.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ctx.report(m=1.0)

    assert {trial.state for trial in search(tmp_path, train)} == {"finished"}


def shared_memory(make):
    """A train function that makes its model of tensors that it finds outside of itself."""

    def train(ctx):
        model = make()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        (model(torch.tensor([1])) - 1).square().sum().backward()
        optimizer.step()
        ctx.report(m=1.0)

    return train


def vectors_of_torch():
    vectors = torch.zeros(4, 2)
    return lambda: torch.nn.Embedding.from_pretrained(vectors, freeze=False)


def vectors_of_numpy():
    array = np.zeros((4, 2), np.float32)
    return lambda: torch.nn.Embedding.from_pretrained(torch.from_numpy(array), freeze=False)


def vectors_beside_the_counters():
    vectors = torch.zeros(4, 2)
    return lambda: torch.nn.Embedding.from_pretrained(vectors.data, freeze=False)


def assigned():
    before = torch.nn.Embedding(4, 2).state_dict()

    def make():
        model = torch.nn.Embedding(4, 2)
        model.load_state_dict(before, assign=True)
        return model

    return make


@pytest.mark.parametrize(
    "make", [vectors_of_torch, vectors_of_numpy, vectors_beside_the_counters, assigned]
)
def test_nor_from_memory_that_another_has_trained(tmp_path, make):
    first, *others = search(tmp_path, shared_memory(make()))
    assert first.state == "finished"
    for trial in others:
        assert trial.state == "failed"
        assert "'weight' is as an earlier trial of this process has left it" in trial.traceback


def parts_of_what_all_share(cuts, renew=lambda part: part):
    shared, cut = torch.zeros(8, 2), iter(cuts)

    def make():
        part = renew(shared[slice(*next(cut))])
        return torch.nn.Embedding.from_pretrained(part, freeze=False)

    return make


def test_nor_from_a_part_of_it(tmp_path):
    """Trials with layers of different widths, which are cut out of one tensor."""
    make = parts_of_what_all_share([(0, 4), (1, 8), (0, 3)])
    first, *others = search(tmp_path, shared_memory(make))
    assert first.state == "finished"
    for trial in others:
        assert "'weight' is as an earlier trial of this process has left it" in trial.traceback


def other_parts():
    return parts_of_what_all_share([(0, 2), (2, 4), (4, 8)])


def renewed_parts():
    return parts_of_what_all_share([(0, 4), (1, 8), (0, 3)], lambda part: part.normal_())


def copied_state():
    before = torch.nn.Embedding(4, 2).state_dict()

    def make():
        model = torch.nn.Embedding(4, 2)
        model.load_state_dict(before)
        return model

    return make


def deep_copies():
    outside = torch.nn.Embedding(4, 2)
    return lambda: copy.deepcopy(outside)


def cloned_vectors():
    vectors = torch.zeros(4, 2)
    return lambda: torch.nn.Embedding.from_pretrained(vectors.clone(), freeze=False)


def renewed_vectors():
    vectors = torch.zeros(4, 2)
    return lambda: torch.nn.Embedding.from_pretrained(vectors.normal_(), freeze=False)


def new_arrays():
    """Which may lie where that of the trial before lay."""
    return lambda: torch.nn.Embedding.from_pretrained(
        torch.from_numpy(np.zeros((4, 2), np.float32)), freeze=False
    )


@pytest.mark.parametrize(
    "make",
    [
        copied_state,
        deep_copies,
        cloned_vectors,
        renewed_vectors,
        new_arrays,
        other_parts,
        renewed_parts,
    ],
)
def test_a_model_that_is_made_anew_is_new(tmp_path, make):
    results = search(tmp_path, shared_memory(make()))
    assert {trial.state for trial in results} == {"finished"}


@pytest.mark.parametrize("norm", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
@pytest.mark.parametrize("how", ["train", "eval", "reset"])
def test_statistics_of_batch_norm_do_not_pass_from_trial_to_trial(tmp_path, norm, how):
    """Of a frozen backbone in training mode: a trial's result hung on which had come before it."""
    backbone = norm(2, affine=True, track_running_stats=True).requires_grad_(requires_grad=False)

    def train(ctx):
        backbone.train(how != "eval")
        if how == "reset":
            backbone.reset_running_stats()
        head = torch.nn.Linear(4, 1)
        model = torch.nn.Sequential(backbone, head)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(head.parameters(), lr=0.1))
        before = backbone.running_mean.tolist()
        model(torch.rand(3, 2, 4)).sum().backward()
        optimizer.step()
        ctx.report(m=before[0])

    first, *others = search(tmp_path, train)
    assert first.metrics["m"] == 0.0
    if how != "train":
        assert [trial.metrics["m"] for trial in others] == [0.0] * len(others)
        return
    for trial in others:
        assert trial.state == "failed"
        assert "is as an earlier trial of this process has left it" in trial.traceback


def test_a_best_trial_without_a_model_says_why(tmp_path):
    """Median stops it in the middle; the others fell behind what it had reported then."""
    elastix.Store(tmp_path).close()
    whys = {TrialState.STOPPED: "rungs stopped it", TrialState.FINISHED: "did not call ctx.prepare"}
    for state, why in whys.items():
        trial = Trial(3, Suggestion({"x": 0.5}), state, (-0.5,))
        with pytest.raises(NotFound, match=f"trial 3 left no model: .*{why}"):
            Best(trial, {"m": 0.5}, str(tmp_path)).load()


def test_numbers_and_text_that_no_column_holds_are_written_as_json(tmp_path):
    def train(ctx):
        ctx.report(m=1.0, large=1 << 70, path="\udc80", some=1 << 60)
        ctx.report(some=0.5 if ctx.config["x"] > 0.5 else 1 << 60)

    table = pd.read_parquet(search(tmp_path, train, 8).to_parquet(tmp_path / "t.parquet"))
    assert set(table["m:large"]) == {str(1 << 70)}
    assert set(table["m:path"]) == {'"\\udc80"'}
    with pytest.raises(elastix.ConfigError, match="cannot be written"):
        elastix.Results.open(tmp_path, "odd").to_parquet(tmp_path / "none" / "t.parquet")
    assert set(table["m:some"]) == {"0.5", str(1 << 60)}


def test_whole_numbers_that_no_float_holds_are_in_an_optuna_journal(tmp_path, monkeypatch):
    """Optuna compares them as floats, and one came to lie beside the range of all.

    Of a campaign from before such ranges were refused.
    """
    monkeypatch.setattr("elastix.search.space._EXACT", 2**63)
    optuna = pytest.importorskip("optuna")
    least = 2**53 + 1  # as a float it is less
    results = elastix.Campaign(
        lambda ctx: ctx.report(m=1.0),
        space=ConfigurationSpace({"seed": (least, 2**62)}),
        metric="m",
        budget=elastix.Budget(trials=2),
        run=elastix.RunConfig(name="odd", store=str(tmp_path)),
        executor=Local(),
        enqueued=[{"seed": least}],
        quiet=True,
    ).run()
    backend = optuna.storages.journal.JournalFileBackend(str(results.to_optuna(tmp_path / "log")))
    study = optuna.load_study(study_name="odd", storage=optuna.storages.JournalStorage(backend))
    assert [trial.params["seed"] for trial in study.trials] == [t.config["seed"] for t in results]


def test_a_failed_trial_has_no_objective_in_a_table_among_several_either(tmp_path):
    def train(ctx):
        if ctx.config["x"] > 0.7:
            raise ValueError("before any report")
        ctx.report(m=1.0, n=2.0)
        if ctx.config["x"] > 0.5:
            raise ValueError("after one")

    results = search(tmp_path, train, 8, ["m", "n"])
    table = results.dataframe()
    assert "objective" not in table
    assert 0 < sum(trial.scored for trial in results) < 8
    for name in ("objective_0", "objective_1"):
        assert table[name].notna().tolist() == [trial.scored for trial in results]


def test_a_metric_that_is_called_as_what_elastix_knows_keeps_its_value(tmp_path):
    def train(ctx):
        ctx.report(m=1.0, epochs=7, role="mine")

    row = search(tmp_path, train, 1).rows()[0]
    assert (row["m:epochs"], row["m:role"]) == (1.0, "search")
    assert (row["m:reported:epochs"], row["m:reported:role"]) == (7, "mine")


def test_what_is_asked_of_results_that_they_do_not_have_is_named(tmp_path):
    results = search(tmp_path, lambda ctx: ctx.report(m=1.0), 2)
    assert results.top(0) == []
    for wrong in (-1, 1.5, "all"):
        with pytest.raises(elastix.ConfigError, match=f"count={wrong!r}"):
            results.top(wrong)
    with pytest.raises(elastix.NotFound, match="trial 99"):
        results.schedule(99)
    with pytest.raises(elastix.ConfigError, match="cannot be written"):
        results.to_optuna(tmp_path / "none" / "journal")


def test_a_schedule_whose_beginning_was_removed_is_not_told():
    """Somebody has taken the trial out of the database in whose place this one goes on."""
    child = Trial(
        1,
        Suggestion({"x": 0.5}, Ref("0" * 64), parent_number=0, in_place=True),
        inherited={"ref": "0" * 64, "lineage_epochs": 1.0},
    )
    results = Results(Objectives.of("m"), {"name": "odd"}, (child,), (), "store")
    with pytest.raises(NotFound, match="trial 1 goes on in the place of trial 0"):
        results.schedule(1)


@pytest.mark.parametrize("metric", ["", ["m", ""]])
def test_a_metric_without_a_name_is_refused(tmp_path, metric):
    with pytest.raises(elastix.ConfigError, match="metric="):
        search(tmp_path, print, metric=metric)


def test_the_tag_names_the_best_model_also_where_a_better_trial_has_left_none(tmp_path):
    """As one that `Median` has stopped."""

    def train(ctx):
        if ctx.config["leaves"]:
            ctx.prepare(torch.nn.Linear(1, 1))
        ctx.report(score=0.0 if ctx.config["leaves"] else 1.0)

    results = elastix.Campaign(
        train,
        space=ConfigurationSpace({"leaves": [True, False]}),
        searcher=elastix.Random(),
        metric="score",
        budget=elastix.Budget(trials=2),
        run=elastix.RunConfig(name="odd", store=str(tmp_path)),
        executor=Local(),
        quiet=True,
    ).run()
    assert results.best.ref is None
    with Store(tmp_path, read_only=True) as store:
        assert store.tags() == {"odd/best": results.top()[1].ref}

"""The file from which the command line goes on with a campaign: what it holds, and old ones."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
import threading
import types

import cloudpickle
import pytest
from typer.testing import CliRunner

import elastix
from elastix import cli
from elastix.errors import ConfigError, NotFound, SearchError
from elastix.search.campaign import Campaign
from elastix.search.executors import campaign_file
from elastix.search.executors.serial import Local
from elastix.search.executors.tune_trials import Tune
from tests.search_parts import SPACE


def train(ctx):
    ctx.report(accuracy=ctx.config["x"], size=1.0)


def campaign(tmp_path, **options) -> Campaign:
    run = elastix.RunConfig(name="kept", store=str(tmp_path))
    common = {"metric": ["accuracy", "size"], "mode": ["max", "min"], "run": run, "quiet": True}
    common["budget"] = elastix.Budget(trials=3)
    return Campaign(train, space=SPACE, **{**common, **options})


def test_what_is_kept_is_the_call_that_made_it(tmp_path):
    made = campaign(tmp_path, rerank="scratch", retries=2, searcher=elastix.Evolution(population=7))
    wanted = set(inspect.signature(Campaign.__init__).parameters) - {"self"}
    assert set(made._arguments()) == wanted
    campaign_file.keep(campaign_file.pickled(made), tmp_path)
    found = campaign_file.read(tmp_path)
    before, after = made._arguments(), found._arguments()
    assert vars(after.pop("searcher")) == vars(before.pop("searcher"))
    assert after.pop("train").__name__ == before.pop("train").__name__
    assert after.pop("space") == before.pop("space")
    assert after == before


def test_going_on_changes_what_is_asked_for_and_nothing_else(tmp_path):
    made = campaign(tmp_path, retries=2)
    budget = elastix.Budget(trials=9)
    again = made.again(budget=budget, store=str(tmp_path / "moved"), quiet=False)
    changed = {
        name
        for name, value in made._arguments().items()
        if again._arguments()[name] is not value and again._arguments()[name] != value
    }
    assert changed == {"budget", "run", "quiet"}
    assert (again.budget, again._run.store) == (budget, str(tmp_path / "moved"))


def test_a_campaign_with_an_executor_of_its_own_can_be_copied(tmp_path):
    """What it had not been given was given to the copy, which refused it."""
    made = campaign(tmp_path, executor=Local())
    for again in (copy.deepcopy(made), pickle.loads(cloudpickle.dumps(made))):
        assert isinstance(again._arguments()["executor"], Local)
        assert len(again.run()) == 3


class Elsewhere(Local):
    """An executor of a user."""


class Unpicklable(Local):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class WithThreads(Local):
    """What most executors are that have been opened; some may be opened once alone."""

    lock = None

    def open(self, train):
        assert self.lock is None
        super().open(train)
        self.lock = threading.Lock()

    def close(self):
        super().close()
        self.lock = None


@pytest.mark.parametrize("own", [Elsewhere, WithThreads])
def test_the_command_line_goes_on_where_the_campaign_ran(tmp_path, own):
    """With the executor as it is before it is opened, and not with workers of a cluster."""
    campaign(tmp_path, executor=own()).run()
    kept = campaign_file.read(tmp_path / "runs" / "kept")
    assert type(kept._arguments()["executor"]) is own
    budget = elastix.Budget(trials=5)
    assert len(kept.again(budget=budget, store=str(tmp_path), quiet=True).run()) == 5


def test_the_command_line_refuses_where_it_cannot_go_on_as_the_campaign_ran(tmp_path, caplog):
    assert len(campaign(tmp_path, executor=Unpicklable()).run()) == 3
    assert "cannot pickle '_thread.lock'" in caplog.text
    asked = ["campaign", "resume", "kept", "--trials", "5", "--store", str(tmp_path)]
    told = CliRunner().invoke(cli.app, asked)
    assert told.exit_code == 1
    assert "Run its script again" in " ".join(told.output.split())
    assert len(elastix.Results.open(tmp_path, "kept")) == 3


def test_ray_tune_as_an_executor_is_kept_as_it_was_asked_for(tmp_path):
    made = Tune(parallel=3, storage_path=str(tmp_path), name="mine")
    for again in (copy.deepcopy(made), pickle.loads(cloudpickle.dumps(made))):
        assert (again._parallel, again._storage, again._name) == (3, str(tmp_path), "mine")
        assert again._scaling == made._scaling


def test_how_many_at_once_is_the_affair_of_an_executor_of_its_own(tmp_path):
    campaign(tmp_path, executor=WithThreads()).run()
    kept = campaign_file.read(tmp_path / "runs" / "kept")
    with pytest.raises(ConfigError, match="parallel=4"):
        kept.again(budget=elastix.Budget(trials=5, parallel=4), store=str(tmp_path), quiet=True)


def test_a_budget_that_leaves_out_how_many_at_once_is_refused_by_no_executor(tmp_path):
    kept = campaign(tmp_path, executor=WithThreads(), budget=elastix.Budget(trials=3, parallel=4))
    more = elastix.Budget(trials=5)
    assert kept.again(budget=more, store=str(tmp_path), quiet=True).budget == more


@pytest.mark.parametrize("error", [pickle.PicklingError, TypeError, OSError])
def test_what_cannot_be_pickled_is_told_of_and_the_campaign_runs(tmp_path, caplog, error):
    class Logger:
        def __reduce__(self):
            raise error("a part of it is another one")

    campaign_file.keep(campaign_file.pickled("as it was before"), tmp_path)
    campaign_file.keep(campaign_file.pickled(Logger()), tmp_path)
    assert "a part of it is another one" in caplog.text
    with pytest.raises(NotFound):
        campaign_file.read(tmp_path)


def test_where_nothing_was_kept(tmp_path):
    with pytest.raises(NotFound, match="no campaign that was kept"):
        campaign_file.read(tmp_path)


def of_a_module_that_is_gone() -> bytes:
    """A pickle that names a class of a module of elastix that there is no longer."""
    gone = types.ModuleType("elastix.search.seat")
    gone.Seat = type("Seat", (), {"__module__": gone.__name__})
    sys.modules[gone.__name__] = gone
    try:
        return pickle.dumps(gone.Seat())
    finally:
        del sys.modules[gone.__name__]


def of_a_class_that_is_gone() -> bytes:
    return b"celastix.search.campaign\nExpedition\n."


def of_a_campaign_before() -> bytes:
    """As pickle wrote it when a campaign was kept as its attributes."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {Campaign: lambda c: (object.__new__, (type(c),), {"_seats": 3})}
    pickler.dump(Campaign.__new__(Campaign))
    return file.getvalue()


def of_a_call_with_an_argument_that_is_gone() -> bytes:
    return pickle.dumps(Made())


class Made:
    """Pickled as a call of Campaign as it may once have been."""

    def __reduce__(self):
        return Campaign, (print, "warm")


@pytest.mark.parametrize(
    "old",
    [
        of_a_module_that_is_gone,
        of_a_class_that_is_gone,
        of_a_campaign_before,
        of_a_call_with_an_argument_that_is_gone,
        lambda: b"",
        lambda: b"\x80\x05\x95garbage",
    ],
    ids=["module", "class", "attributes", "argument", "empty", "garbage"],
)
def test_one_of_another_version_says_what_to_do_and_stays_as_it_is(tmp_path, old):
    path = tmp_path / "campaign.pkl"
    path.write_bytes(old())
    with pytest.raises(SearchError, match="run the script again") as raised:
        campaign_file.read(tmp_path)
    assert "nothing that the campaign has found is lost" in str(raised.value)
    assert path.read_bytes() == old()


WITHOUT_RAY = """
import sys
import elastix
from ConfigSpace import ConfigurationSpace
from elastix.search.executors.serial import Local

def train(ctx):
    ctx.report(score=ctx.config["x"])

elastix.Campaign(
    train,
    space=ConfigurationSpace({"x": (0.0, 1.0)}),
    metric="score",
    budget=elastix.Budget(trials=2),
    run=elastix.RunConfig(name="kept", store=sys.argv[1]),
    executor=Local(),
    quiet=True,
).run()
print("ray" in sys.modules)
"""


def test_a_campaign_in_its_own_process_does_not_import_ray(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_RAY)
    said = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert said.stdout.split()[-1] == "False"
    found = campaign_file.read(tmp_path / "runs" / "kept")
    assert found.budget == elastix.Budget(trials=2)


def test_what_ray_was_told_to_take_whole_is_taken_where_ray_is_in_use(tmp_path, monkeypatch):
    import ray

    module = types.ModuleType("told_of_to_ray")
    exec("def train(ctx): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        made = campaign(tmp_path)
        made._train = module.train
        campaign_file.keep(campaign_file.pickled(made), tmp_path)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert campaign_file.read(tmp_path)._train.__name__ == "train"

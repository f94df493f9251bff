"""Scripts that commands load for what is in them."""

import os

import pytest

from elastix.commands.run import load, train_function
from elastix.errors import ConfigError

SEARCHES = """
from pathlib import Path
from ConfigSpace import ConfigurationSpace
import elastix
from elastix.search.executors.serial import Local

def train(ctx):
    ctx.report(m=1.0)

elastix.Campaign(
    train,
    space=ConfigurationSpace({"x": (0.0, 1.0)}),
    metric="m",
    budget=elastix.Budget(trials=1),
    run=elastix.RunConfig(store=str(Path(__file__).parent / "store")),
    executor=Local(),
).run()
"""


def test_a_script_that_starts_something_by_itself_is_not_loaded(tmp_path):
    """`elastix estimate` and `serve-model` want its model alone, and trained it first."""
    script = tmp_path / "searches.py"
    script.write_text(SEARCHES)
    with pytest.raises(ConfigError, match=r"calls run\(\) itself when it is loaded"):
        load(script, script.stem)
    assert not (tmp_path / "store").exists()


def test_a_script_that_is_no_file_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")  # a read of it would wait, and one of /dev/zero never end
    with pytest.raises(ConfigError, match=r"there is no file .*pipe\.py. Nothing was started"):
        train_function(tmp_path / "pipe.py", "train")

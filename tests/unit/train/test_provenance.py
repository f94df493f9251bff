"""Which elastix a process has: what it is told by, and what is said where two differ."""

import logging
import pickle
from dataclasses import replace
from importlib import metadata

import pytest

from elastix.train.record import provenance
from elastix.train.record.provenance import (
    Installation,
    installation,
    other_code,
    versions,
    warn_of_other,
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in place of elastix; each call looks anew."""
    folder = tmp_path / "elastix"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("one")
    (folder / "inner" / "part.py").write_text("two")
    monkeypatch.setattr(provenance.elastix, "__file__", str(folder / "__init__.py"))
    return folder


def looked():
    return installation.__wrapped__()


def test_equal_code_elsewhere_is_the_same(package):
    mine = looked()
    assert mine.is_same(replace(mine, directory="/elsewhere", version="9"))
    (package / "inner" / "part.py").write_text("three")
    assert not looked().is_same(mine)


def test_what_an_editor_leaves_beside_modules_is_none(package):
    """Of these the first leads nowhere while somebody edits the file."""
    mine = looked()
    (package / ".#part.py").symlink_to("somebody@host.1:2")
    (package / ".ipynb_checkpoints").mkdir()
    (package / ".ipynb_checkpoints" / "part-checkpoint.py").write_text("an older one")
    assert looked() == mine


def test_one_that_is_not_installed_has_no_version(package, monkeypatch):
    """A job may carry the package, and the nodes have none."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(provenance.metadata, "version", missing)
    mine = looked()
    assert mine.version == versions()["elastix"] == ""
    assert str(mine).startswith(f"in {package} (code ")
    assert mine.is_same(Installation("0.1", "/elsewhere", mine.digest))


def test_a_process_that_comes_later_says_if_it_has_another(caplog):
    mine = installation()
    warn_of_other(mine, "the new controller")
    assert not caplog.records
    warn_of_other(replace(mine, digest="other"), "the new controller")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("the new controller has elastix ")


def test_a_worker_with_other_code_is_refused():
    mine = installation()
    assert other_code(mine, mine, "node n") is None
    refused = other_code(replace(mine, version="9", digest="other"), mine, "node n")
    assert str(refused).startswith(f"node n has elastix {mine}, and the driver has 9 in ")
    assert "it was changed since the driver began" in str(refused)
    refused = other_code(replace(mine, directory="/elsewhere", digest="other"), mine, "node n")
    assert "Install the same on all nodes" in str(refused)
    assert "changed" not in str(refused)
    refused = pickle.loads(pickle.dumps(other_code(mine, None, "node n (of worker 3)", "n")))
    assert str(refused).startswith("node n (of worker 3) has another elastix, which does not say ")
    assert refused.node == "n"

"""Imports of a new process: no collection during them, and none of their objects in later ones."""

import gc

import pytest

from elastix.frozen_imports import import_frozen

MODULE = """
import gc
enabled = gc.isenabled()
kept = [[] for _ in range(1000)]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "frozen_example.py").write_text(MODULE)
    (tmp_path / "frozen_fault.py").write_text("raise OSError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("module")
def test_nothing_is_collected_during_an_import_and_what_it_made_never_is_walked_over():
    frozen = gc.get_freeze_count()
    import_frozen("frozen_example")
    import frozen_example

    assert not frozen_example.enabled
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + 1000
    walked = {id(made) for made in gc.get_objects()}
    assert not any(id(made) in walked for made in frozen_example.kept)


@pytest.mark.usefixtures("module")
def test_a_failed_import_leaves_the_collector_on():
    with pytest.raises(OSError, match="no"):
        import_frozen("frozen_fault")
    assert gc.isenabled()


@pytest.mark.usefixtures("module")
def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        import_frozen("frozen_example")
        assert not gc.isenabled()
    finally:
        gc.enable()

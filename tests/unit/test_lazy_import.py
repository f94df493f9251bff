"""Modules that are imported when something in them is first used."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from elastix.lazy_import import later


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that nobody has imported; it has a `value`."""
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    return "imported_later"


def test_it_is_imported_by_its_first_use(name: str) -> None:
    module = later(name)
    assert name not in sys.modules
    assert module.value == 1
    assert name in sys.modules


def test_what_the_module_gets_later_is_found(name: str) -> None:
    module = later(name)
    assert module.value == 1
    vars(sys.modules[name])["other"] = 2
    assert module.other == 2
    with pytest.raises(AttributeError, match=r"imported_later.*nothing"):
        _ = module.nothing


def test_then_it_is_a_module_as_any_other(name: str) -> None:
    """Python looks names up faster in those than where a class has a say."""
    module = later(name)
    assert module.value == 1
    assert type(module) is ModuleType

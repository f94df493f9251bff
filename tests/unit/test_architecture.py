"""What the layout promises and import-linter cannot see."""

import ast
import functools
import importlib
import pkgutil
from collections import defaultdict
from pathlib import Path

import pytest

import elastix
import search_spaces

ROOT = Path(elastix.__file__).parent
RAY = (
    "train/on_ray/",
    "search/executors/",
    "observe/ray_metrics.py",
    "observe/ray_death_messages.py",
)
RAY += ("store/server.py", "tune.py", "ray_train/", "search/tune_space.py", "search/campaign.py")
RAY += ("commands/doctor.py", "commands/status.py", "bench/elastic_group.py")
SOURCES = sorted(ROOT.rglob("*.py"))
OF_THE_WHOLE = {"architecture", "documents", "every_argument"}
OF_THE_WHOLE |= {"manifests", "recipes", "search_spaces"}
LONGEST = 800  # lines; see "Long files" in DESIGN.md


def module_names():
    for package in (elastix, search_spaces):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            yield found.name


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@functools.cache
def names_in(path):
    """What a file imports or looks up, in full."""
    return frozenset(imported(ast.parse(path.read_text())))


def users_of(package):
    """Files that name it, as paths within elastix."""
    for path in SOURCES:
        names = names_in(path)
        if any(name == package or name.startswith(f"{package}.") for name in names):
            yield path.relative_to(ROOT).as_posix()


def test_all_is_what_is_exported():
    public = {name for name in vars(elastix) if not name.startswith("_")} | set(elastix._LATER)
    modules = {name for name in public if hasattr(getattr(elastix, name), "__path__")}
    submodules = {m.name for m in pkgutil.iter_modules(elastix.__path__)}
    assert public - modules - submodules == set(elastix.__all__)
    assert list(elastix.__all__) == sorted(elastix.__all__)


def test_public_names_are_documented():
    for name in elastix.__all__:
        if elastix._LATER.get(name) != "ConfigSpace":  # whose own documentation is elsewhere
            assert getattr(elastix, name).__doc__, name


def test_torch_distributed_lives_only_in_comm_beside_the_state_and_in_what_compares():
    ends_what_trials_leave = "search/executors/process_settings.py"
    allowed = ("comm/", "sharding.py", "mesh_check.py", "bench/ddp_rank.py", ends_what_trials_leave)
    users = list(users_of("torch.distributed"))
    assert users
    assert [path for path in users if not path.startswith(allowed)] == []


def test_ray_lives_only_in_the_shells():
    """Import-linter sees imports inside functions too, but no `sys.modules["ray"]`, no `ray.x`."""
    users = list(users_of("ray"))
    assert users
    assert [path for path in users if not path.startswith(RAY)] == []


def test_no_file_is_too_long():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: n for path, n in lengths.items() if n > LONGEST} == {}


@pytest.mark.parametrize("name", sorted(module_names()))
def test_every_module_imports_and_says_what_it_is(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(module.__doc__.strip()) > 20


def test_no_name_of_a_class_has_two_meanings():
    """Names with an underscore are a file's own."""
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_two_files_have_one_name():
    places = defaultdict(list)
    for path in SOURCES:
        places[path.name].append(str(path.relative_to(ROOT)))
    del places["__init__.py"]
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_unit_tests_have_the_shape_of_the_package():
    """A module's test lies in the folder of its package, and no folder is of anything else."""
    folders = {path.stem: path.relative_to(ROOT).parts[:-1][:1] for path in SOURCES}
    unit = Path(__file__).parent
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"benchmarks"}
    for path in unit.rglob("test_*.py"):
        *folder, name = path.relative_to(unit).parts
        assert len(folder) < 2
        assert set(folder) <= packages
        module = name.removeprefix("test_").removesuffix(".py")
        if [module] == folder or folder == ["benchmarks"]:
            continue  # of a package as a whole
        if module in folders:
            assert tuple(folder) == folders[module], path
        elif not folder:  # about the whole, or about what lies beside the package
            assert module in OF_THE_WHOLE, path

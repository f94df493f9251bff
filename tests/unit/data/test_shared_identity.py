"""What a shared dataset is known by: its code counts, wherever it stands."""

import pickle
import threading

import pytest
import torch
from blake3 import blake3
from torch.utils.data import Dataset

from elastix.data.shared.identity import digest_into
from tests.pictures import Pictures

CODE = """
import functools, threading
from torch.utils.data import Dataset
SIZES = {"small": (3, [4]), "large": (5, [6])}
LOCK = threading.Lock()
def recursive(n): return recursive(n - 1) if n else helper(n)
def helper(n): return n * SIZES["small"][0]
def made(more): return lambda x: x + more
class Base(Dataset):
    KIND = "a"
    def __len__(self): return 3
    @property
    def first(self): return 1
    @staticmethod
    def still(): return 2
    @functools.cached_property
    def cached(self): return "b" in {"x", "y", "b"}
class Data(Base):
    def __init__(self): self.decode = made(1)
    def __getitem__(self, index):
        with LOCK: return recursive(index)
def dataset(): return Data()
"""


def key(value) -> str:
    digest = blake3()
    digest_into(digest, value)
    return digest.hexdigest()


def dataset(code: str = CODE, name: str = "__main__") -> Dataset:
    """As a script of that name has it, which need not be there any more."""
    names = {"__name__": name}
    exec(compile(code, "script.py", "exec"), names)
    return names["dataset"]()


def test_the_same_code_is_the_same_dataset_wherever_it_stands():
    assert key(dataset()) == key(dataset("# moved down\n\n" + CODE, "another"))
    read = dataset()
    assert read[0] == 0
    type(read).__slotnames__ = []  # as pickling leaves it
    assert key(read) == key(dataset())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return recursive(index)", "return recursive(index) + 1"),  # its own method
        ("n * SIZES", "n + SIZES"),  # a function that it refers to by another
        ("(3, [4])", "(3, [7])"),  # a constant
        ("if n else", "if n > 1 else"),
        ("x + more", "x - more"),  # a function that it holds
        ("made(1)", "made(2)"),  # what that closes over
        ('KIND = "a"', 'KIND = "b"'),
        ("return 1", "return 7"),
        ("return 2", "return 7"),
        ('"y", "b"', '"y", "c"'),
        ("class Data(Base)", "class Data(Dataset)"),
    ],
)
def test_other_code_is_another_dataset(before, after):
    assert before in CODE
    changed = CODE.replace(before, after)
    if "Dataset)" in after:
        changed = changed.replace("class Data(Dataset):", "class Data(Dataset):\n    KIND = 0")
    assert key(dataset(changed)) != key(dataset())


USED = """
class Data:
    def __getitem__(self, index): return used(index)
def dataset(): return Data()
"""
IN_PACKAGE = """
import types
package, inner = types.ModuleType("package"), types.ModuleType("package.inner")
package.inner, inner.package = inner, package
package.__path__, inner.__file__ = ["/home/package"], "/home/package/inner.py"
exec("def f(n): return n * 2", vars(inner))
del inner
def used(n): return package.inner.f(n)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import functools\n@functools.cache\ndef used(n): return n * 2",
        "import functools\ndef f(n): return n * 2\nused = functools.partial(f)",
        "import functools\ndef f(n, by): return n * by\nused = functools.partial(f, by=2)",
        "ALL = {'a': [lambda n: n * 2]}\ndef used(n): return ALL['a'][0](n)",
        IN_PACKAGE,
    ],
)
def test_a_function_counts_however_it_is_reached(code):
    changed = code.replace("2", "3")
    assert (dataset(code + USED)[1], dataset(changed + USED)[1]) == (2, 3)
    assert key(dataset(code + USED)) == key(dataset("# moved\n" + code + USED))
    assert key(dataset(code + USED)) != key(dataset(changed + USED))


def test_what_a_library_has_is_known_by_its_name():
    assert key(torch.nn.Linear) == key(torch.nn.Linear) != key(torch.nn.Conv2d)
    with pytest.raises(TypeError, match="cannot pickle"):
        key(threading.Lock())


def test_a_copy_of_a_dataset_is_the_same_one():
    assert key(Pictures(size=900)) == key(pickle.loads(pickle.dumps(Pictures(size=900))))

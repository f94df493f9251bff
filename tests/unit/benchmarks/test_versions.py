"""What is tried with other versions, and how what comes of it is read. Installs nothing."""

import json
import re
import sys
import tomllib

import pytest

from benchmarks import versions
from benchmarks.install import ROOT
from benchmarks.table import RESULTS
from benchmarks.versions import (
    ROWS,
    NotInstalled,
    Row,
    counted,
    interpreter,
    oldest,
    passed,
    requirements,
    tried,
)

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
PROJECT = tomllib.loads(PYPROJECT)["project"]
REPORT = """<testsuites><testsuite time="12.34">
<testcase classname="tests.unit.test_a" name="test_good" />
<testcase classname="tests.unit.test_a" name="test_bad"><failure message="no" /></testcase>
<testcase classname="tests.unit.test_b" name="test_left_out"><skipped message="no GPU" /></testcase>
<testcase classname="" name="tests.unit.test_c"><error message="collection failure" /></testcase>
</testsuite></testsuites>"""


def test_a_row_is_python_torch_and_ray():
    assert Row.of("3.13:newest:2.50") == Row("3.13", "newest", "2.50")
    assert str(Row.of("3.11:2.13.0:oldest")) == "3.11:2.13.0:oldest"
    for text in ("3.13", "3.13:newest", "newest:newest:newest", "3.13:new:2.50", "3.13:2:2.50"):
        with pytest.raises(ValueError, match="PYTHON:TORCH:RAY"):
            Row.of(text)


def test_pip_is_told_what_the_row_says():
    project = (
        '[project]\ndependencies = ["torchft>=7.0", "torch>=2.9", "ray[default,tune]>=2.50"]\n'
    )
    assert requirements(Row("3.11", "oldest", "newest"), project) == ["torch==2.9.*", "ray"]
    assert requirements(Row("3.11", "newest", "oldest"), project) == ["torch", "ray==2.50.*"]
    assert requirements(Row("3.11", "2.13", "2.55"), project) == ["torch==2.13.*", "ray==2.55.*"]
    with pytest.raises(ValueError, match="no least version of numpy"):
        oldest("numpy", project)


def test_the_report_of_pytest_is_counted():
    assert counted(REPORT) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "seconds": 12.3,
        "failures": {
            "tests.unit.test_a::test_bad": "no",
            "::tests.unit.test_c": "collection failure",
        },
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"tests": {"failed": 0}, "run": {"passed": True}}, True),
        ({"tests": {"failed": 1}, "run": {"passed": True}}, False),
        ({"tests": {"failed": 0}, "run": {"passed": False}}, False),
        ({"not_installed": "pip: no such version"}, False),
    ],
)
def test_a_row_has_passed_if_nothing_in_it_failed(found, expected):
    assert passed(found) is expected


def test_a_python_that_is_not_there_is_a_reason_and_not_an_error(tmp_path):
    found = tried(Row("3.99", "newest", "newest"), tmp_path / "no.whl", tmp_path, tmp_path)
    assert found == {"not_installed": "there is no python3.99 here"}
    with pytest.raises(NotInstalled):
        interpreter("3.99")


@pytest.mark.slow
def test_what_pip_says_is_the_reason(tmp_path, monkeypatch):
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(versions, "interpreter", lambda _: sys.executable)
    wheel = tmp_path / "no-such-1-py3-none-any.whl"
    found = tried(Row(here, "newest", "newest"), wheel, tmp_path, tmp_path / "fetched")
    assert set(found) == {"not_installed"}
    assert "no-such-1-py3-none-any.whl" in found["not_installed"]
    assert not list(tmp_path.glob(f"{here}*")), "its environment is removed"


def test_pyproject_names_no_python_that_has_not_passed():
    rows = json.loads((RESULTS / "versions.json").read_text("utf-8")).values()
    good = {row["installed"]["python"].rpartition(".")[0] for row in rows if passed(row)}
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", str(PROJECT["classifiers"]))
    assert set(named) <= good


def test_each_end_of_the_ranges_has_a_row():
    for least in ("torch", "ray"):
        assert any(getattr(row, least) == "oldest" for row in ROWS)
        assert any(getattr(row, least) == "newest" for row in ROWS)

"""Every code block of the README and of docs/ is run, or is no code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from typer.testing import CliRunner

from elastix.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = {"python", "sh"}
NOT_CODE = {"", "text"}  # output, layouts, and the make targets, which CI runs by themselves
_FENCE = re.compile(r"^```(\w*)$", re.MULTILINE)


def shell(example: Example) -> None:
    """Run a block of commands as a person would paste it; if all are ours, in this process."""
    lines = str(example.parsed).splitlines()
    if all(re.fullmatch(r"elastix [\w ./,='\"-]+", line) for line in lines):
        for line in lines:
            done = CliRunner().invoke(app, shlex.split(line)[1:])
            assert done.exit_code == 0, f"{example.path}:{example.line}: {line}\n{done.output}"
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", str(example.parsed)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{example.path}:{example.line}\n{done.stdout}{done.stderr}"


PARSERS = Sybil(parsers=[PythonCodeBlockParser(), CodeBlockParser("sh", shell)])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_is_either_run_or_not_code(path):
    languages = _FENCE.findall(path.read_text())[::2]
    assert set(languages) <= RUN | NOT_CODE
    visible = [e for e in PARSERS.parse(path).examples() if "invisible" not in str(e.region)]
    assert len(visible) == sum(language in RUN for language in languages)


@pytest.fixture
def small_cluster(cluster, monkeypatch):
    """Room for two workers of one CPU: a document's groups need not be larger. Commands find it."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.get_runtime_context().gcs_address)
    from ray.util.placement_group import placement_group, remove_placement_group

    taken = placement_group([{"CPU": cluster.cluster_resources()["CPU"] - 2}])
    assert taken.wait(60)
    yield
    remove_placement_group(taken)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if any(PARSERS.parse(path).examples())],
    ids=lambda path: path.name,
)
def test_every_block_runs(path, small_cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = PARSERS.parse(path)
    document.namespace["__name__"] = "__main__"  # functions travel to workers by value
    for example in document.examples():
        example.evaluate()

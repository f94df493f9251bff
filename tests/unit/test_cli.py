"""The command line without a cluster: helps, exit codes, messages, completion, the report verb."""

import inspect
import json
import os
import re
import socket
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

import elastix
from elastix import cli
from elastix.commands.exit_codes import says, show_tracebacks
from elastix.errors import ConfigError, Corrupt
from elastix.observe.journal import Journal
from tests.report_data import run_events

ROOT = typer.main.get_command(cli.app)


def commands(command: click.Command, path: tuple[str, ...] = ()):
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


ALL = list(commands(ROOT))


@pytest.fixture
def store(tmp_path) -> Path:
    with Journal(tmp_path / "runs" / "digits" / "journal.jsonl") as journal:
        for event in run_events(steps=30):
            journal.append(event)
    return tmp_path


def run(*words: str, code: int = 0):
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(p) or "elastix" for p, _ in ALL])
def test_every_command_and_every_parameter_says_what_it_is(path, command):
    assert command.help, path
    assert not re.search(r"\S\n[^\n-]", command.help)  # it would be shown
    assert command.help.rstrip().endswith((".", ")", ":")) or path == (), path
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        assert parameter.help, f"{path} {parameter.name}"
    shown = run(*path, "--help").output
    assert "Usage" in shown


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(p) or "elastix" for p, _ in ALL])
def test_every_verb_prints_json_for_programs(path, command):
    if not hasattr(command, "commands"):
        assert "--json" in [word for p in command.params for word in p.opts], path


def test_report_writes_a_page_and_says_where(store):
    path = store / "runs" / "digits" / "report.html"
    assert run("report", "digits", "--store", str(store)).stdout.strip() == str(path)
    assert path.read_text().startswith("<!doctype html>")
    other = store / "x.html"
    told = json.loads(
        run("report", "digits", "-s", str(store), "--out", str(other), "--json").stdout
    )
    assert told == {"path": str(other), "bytes": other.stat().st_size}


def test_exit_codes_and_messages(store, monkeypatch):
    assert (
        "Did you mean 'digits'? It has digits."
        in run("report", "digit", "--store", str(store), code=1).stderr
    )
    assert "Missing argument" in run("report", code=2).output
    assert "No such command" in run("rapport", code=2).output
    (store / "runs" / "digits" / "journal.jsonl").write_text("{}\n")
    assert "line 1 of" in run("report", "digits", "--store", str(store), code=1).stderr


def test_what_nobody_foresaw_is_a_message_and_its_traceback_comes_on_request(store, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("it")

    monkeypatch.setattr("elastix.report.write_report", broken)
    assert "ZeroDivisionError: it" in run("report", "digits", code=1).stderr
    result = CliRunner().invoke(cli.app, ["--debug", "report", "digits"])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(("error", "code"), [(ConfigError("a"), 2), (Corrupt("b"), 1)])
def test_whose_fault_it_is_shows_in_the_exit_code(error, code):
    def verb() -> None:
        raise error

    show_tracebacks(False)
    with pytest.raises(typer.Exit) as caught:
        says(verb)()
    assert caught.value.exit_code == code


def complete(words: str, store: Path) -> list[str]:
    """What bash would be told."""
    env = {
        **os.environ,
        "_ELASTIX_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "ELASTIX_STORE": str(store),
    }
    code = (
        "import sys; sys.argv = ['elastix']; from elastix.cli import app; app(prog_name='elastix')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return done.stdout.split()


def test_a_shell_completes_verbs_and_runs(store):
    assert {"report", "status", "store"} <= set(complete("elastix ", store))
    assert complete("elastix repo", store) == ["report"]
    assert complete(f"elastix report --store {store} di", store) == ["digits"]
    assert "verify" in complete("elastix store ver", store)


def test_a_reader_that_has_seen_enough_is_no_error():
    """As `elastix ... | head -1` has it."""
    code = """
import typer
from elastix.commands.exit_codes import says

app = typer.Typer()

@app.command()
@says
def lines() -> None:
    while True:
        typer.echo("a line")

app()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"a line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_python_runs_the_package_too():
    done = subprocess.run(
        [sys.executable, "-m", "elastix", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: elastix" in done.stdout


def test_it_says_which_version_it_is():
    assert run("--version").stdout == f"elastix {elastix.__version__}\n"


def test_nearest_means_the_same_in_python_and_on_the_command_line():
    ours = inspect.signature(elastix.Store.nearest).parameters["mode"].default
    assert inspect.signature(cli.nearest).parameters["mode"].default == ours


def test_status_without_a_cluster_says_what_to_do(monkeypatch):
    def nobody(*_arguments, **_named):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr("ray.init", nobody)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    here = run("status", code=1).stderr
    assert here.startswith("elastix: no Ray cluster was found on this machine. Nothing was asked.")
    assert here.rstrip().endswith("(Could not find any running Ray instance.)")
    there = run("status", "--address", "1.2.3.4:5", code=1).stderr
    assert there.startswith("elastix: no Ray cluster answers at 1.2.3.4:5. Nothing was asked.")


@pytest.mark.parametrize("named", [True, False])
def test_status_does_not_wait_for_a_cluster_that_has_ended(monkeypatch, named):
    """Ray notes where a cluster is, and waits for minutes for one that has left the note behind."""
    with socket.socket() as nobody:  # not listening
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("it was waited for"))
        monkeypatch.setattr("ray.is_initialized", lambda: False)
        monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: address)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if named:
            monkeypatch.setenv("RAY_ADDRESS", f"ray://{address}")
        said = run("status", code=1).stderr
    assert "no Ray cluster was found on this machine" in said
    assert f"nobody answers at {'ray://' * named}{address}" in said


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e30", "99999999999999999999", ""])
@pytest.mark.parametrize("option", ["--batch-size", "--samples", "--epochs", "--workers"])
def test_an_estimate_is_of_numbers_that_make_sense(option, value):
    done = CliRunner().invoke(cli.app, ["estimate", "nothing.py", "--shape", "4", option, value])
    assert done.exit_code == 2
    assert "there is no file" not in done.output


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "1e30"])
def test_an_estimate_is_for_a_time_that_makes_sense(value):
    words = ["estimate", "nothing.py", "--shape", "4", "--within-hours", value]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    assert "there is no file" not in done.output


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_what_is_closed_when_a_command_starts_is_no_file_of_its_own_meanwhile(
    store, tmp_path, closed
):
    command = [sys.executable, "-m", "elastix", "runs", "list", "--store", str(store)]
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\n"
        "names = lambda: [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)]\n"
        f"atexit.register(lambda: open({str(tmp_path / 'told')!r}, 'w').write(str(names())))\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    redirected = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        stdin=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert ("digits" in done.stdout) == (1 not in closed)
    names = literal_eval((tmp_path / "told").read_text())
    assert [names[number] for number in closed] == ["/dev/null"] * len(closed)

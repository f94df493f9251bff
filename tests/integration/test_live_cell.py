"""A run in a real notebook kernel: one output in the cell, not one for each line."""

import nbclient
import nbformat

CODE = """
from elastix.observe.console import Console
from tests.report_data import run_events

with Console("digits", "runs/store") as console:
    for event in run_events(steps=100, kill_every=40):
        console.show(event)
    console.finished("ab" * 32, {"loss": 0.5}, "samples exact")
"""


def test_a_run_is_one_output_of_its_cell():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    client = nbclient.NotebookClient(
        notebook, timeout=250, startup_timeout=250, kernel_name="python3"
    )
    client.execute()
    (output,) = notebook.cells[0].outputs
    first, *_, last = output["data"]["text/plain"].splitlines()
    assert first.startswith("digits starts")
    assert last.endswith("elastix report digits --store runs/store")
    assert output["data"]["text/html"].startswith("<pre>")


FAILING = """
from elastix.errors import ConfigError
from elastix.observe.excepthook import told


def fit(error):
    raise told(error)


fit({})
"""


def shown_of(code):
    """The error that a notebook shows for a cell, without colours; None where it shows none."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    client = nbclient.NotebookClient(
        notebook, timeout=250, startup_timeout=250, kernel_name="python3", allow_errors=True
    )
    client.execute()
    (output,) = notebook.cells[0].outputs
    return "\n".join(output["traceback"])


def test_an_error_that_was_told_is_the_users_frames_and_its_message():
    text = shown_of(FAILING.format("ConfigError('no loader. Nothing was started.')"))
    assert text.splitlines()[0] == "Traceback (most recent call last):"
    assert "raise told(error)" in text
    assert text.count("no loader") == 2  # the line of the cell, and the message
    assert "IPython" not in text
    assert text.endswith("elastix.errors.ConfigError: no loader. Nothing was started.")


def test_an_interrupt_that_was_told_of_adds_nothing():
    assert shown_of(FAILING.format("KeyboardInterrupt()")) == ""

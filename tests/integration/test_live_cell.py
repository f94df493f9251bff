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
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    first, *_, last = output["data"]["text/plain"].splitlines()
    assert first.startswith("digits starts")
    assert last.endswith("elastix report digits --store runs/store")
    assert output["data"]["text/html"].startswith("<pre>")

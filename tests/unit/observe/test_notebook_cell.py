"""In a notebook a run is one display, updated, whatever happens in it."""

import pytest

from elastix.events import CampaignEnded, CampaignStarted, TrialEnded, TrialStarted
from elastix.observe import console as consoles
from elastix.observe import notebook_cell as cells
from elastix.observe import trials_console
from elastix.observe.console import Console
from elastix.observe.notebook_cell import NotebookCell
from elastix.observe.trials_console import TrialsConsole
from tests.report_data import run_events


class Displays:
    """Keeps what a notebook would show."""

    def __init__(self):
        self.opened = 0
        self.pictures = []

    def show(self, picture):
        self.opened += 1
        self.pictures.append(picture)
        return self

    def update(self, picture, raw):
        assert raw
        self.pictures.append(picture)

    @property
    def text(self):
        return self.pictures[-1]["text/plain"]


@pytest.fixture
def displays(monkeypatch):
    found = Displays()
    for module in (consoles, trials_console):
        monkeypatch.setattr(module, "here", lambda: NotebookCell(found.show))
    return found


def test_a_run_is_one_display_with_its_first_and_last_lines(displays, capsys):
    with Console("digits", "runs/store") as console:
        for event in run_events(steps=200, kill_every=60):
            console.show(event)
        assert "workers" in displays.text
        assert displays.opened == 1
        console.finished("ab" * 32, {"loss": 0.5}, "samples exact")
    assert displays.opened == 1
    assert len(displays.pictures) > 5
    lines = displays.text.splitlines()
    assert lines[0].startswith("digits starts")
    assert "elastix report digits" in lines[-1]
    assert not any("lost: rank" in text for text in lines)  # the block has gone
    assert capsys.readouterr().out == ""


def test_a_campaign_is_one_display_too(displays, tmp_path):
    console = TrialsConsole("nas", tmp_path / "store" / "runs" / "nas", 3)
    console.show(
        CampaignStarted(
            name="nas",
            objectives={"accuracy": "max"},
            budget={},
            searcher="Random",
            inherit="none",
            known=0,
            versions={},
        )
    )
    for number in range(3):
        console.show(TrialStarted(trial=number, config={}, parent=None, attempt=1, rung=None))
        console.show(
            TrialEnded(
                trial=number,
                state="finished",
                values={"accuracy": 0.5},
                metrics={},
                ref="",
                epochs=1,
                lineage_epochs=1,
                inherited=0,
                seconds=1,
                best=True,
            )
        )
    console.show(CampaignEnded(outcome="finished", trials=3, best=0))
    assert displays.opened == 1
    assert displays.text.startswith("nas starts")
    assert "nas finished" in displays.text


def test_what_a_user_wrote_is_no_markup(displays):
    cell = NotebookCell(displays.show)
    cell.terminal().print("<b>bold</b>", markup=False)
    assert displays.pictures[-1]["text/html"] == "<pre>&lt;b&gt;bold&lt;/b&gt;</pre>"


def test_quiet_shows_nothing_and_a_terminal_is_no_notebook(displays):
    with Console("digits", "runs/store", quiet=True) as console:
        console.finished("ab" * 32, {}, "samples exact")
    assert displays.opened == 0
    assert cells.here() is None

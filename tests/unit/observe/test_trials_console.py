"""The console of a campaign: the same rules as for a run."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from elastix.events import (
    CampaignEnded,
    CampaignStarted,
    GenerationFormed,
    Recovered,
    RunStarted,
    StoreMeasured,
    TrialEnded,
    TrialLost,
    TrialStarted,
    TrialStarved,
    WorkerLost,
)
from elastix.observe.journal import Journal
from elastix.observe.trials_console import TrialsConsole
from elastix.report import campaign_part
from tests.report_data import campaign


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def console_of(tty: bool, width: int = 120):
    file, clock = io.StringIO(), Clock()
    terminal = Terminal(
        file=file, force_terminal=tty, width=width, height=40, highlight=False, soft_wrap=not tty
    )
    directory = Path("runs/store/runs/nas-1")
    return TrialsConsole("nas-1", directory, 120, terminal=terminal, clock=clock), file, clock


def events(evil: str = ""):
    yield CampaignStarted(
        name="nas-1",
        objectives={"accuracy": "max"},
        budget={"trials": 120},
        searcher="Evolution",
        inherit="lcs (parent)",
        known=0,
        versions={},
    )
    best = -1.0
    for trial in campaign().trials:
        yield TrialStarted(
            trial=trial.number, config=trial.config, parent=trial.parent, attempt=1, rung=None
        )
        if trial.losses:
            yield TrialLost(trial=trial.number, attempt=1, cause=f"died{evil}")
            yield TrialStarted(
                trial=trial.number, config=trial.config, parent=trial.parent, attempt=2, rung=None
            )
        value = trial.values[0] if trial.values else -1.0
        yield TrialEnded(
            trial=trial.number,
            state=trial.state,
            values={"accuracy": value} if trial.values else {},
            metrics={},
            ref="",
            epochs=trial.epochs,
            lineage_epochs=trial.lineage_epochs,
            inherited=trial.inherited or 0.0,
            seconds=3.0,
            best=value > best,
            message="" if trial.values else f"RuntimeError: shapes{evil}",
        )
        best = max(best, value)
        yield StoreMeasured(
            logical_bytes=7_560_000_000, unique_bytes=1_200_000_000, physical_bytes=1_234_000_000
        )


def play(console, clock, *, evil: str = "", look=lambda: None) -> None:
    for event in events(evil):
        clock.now += 1.0
        console.show(event)
        look()


def test_of_several_objectives_no_trial_is_called_the_best():
    """The latest on the front may be the worst in the first of them."""
    console, file, _ = console_of(tty=False)
    opening = next(events())
    console.show(replace(opening, objectives={"accuracy": "max", "size": "min"}))
    for number, (accuracy, size) in enumerate([(0.9, 3), (0.1, 1)]):
        values = {"accuracy": accuracy, "size": size}
        counts = {"epochs": 1.0, "lineage_epochs": 1.0, "inherited": 0.0, "seconds": 1.0}
        about = {"state": "finished", "metrics": {}, "ref": "", "best": True, "message": ""}
        console.show(TrialEnded(trial=number, values=values, **counts, **about))
    console.show(CampaignEnded(outcome="finished", trials=2, best=1))
    told = file.getvalue()
    assert "best" not in told
    assert "on the front  accuracy 0.9" in told
    assert "  latest on the front  accuracy 0.1" in told


def test_trials_that_are_groups_have_a_line_each(tmp_path):
    file, clock = io.StringIO(), Clock()
    terminal = Terminal(file=file, force_terminal=True, width=120, height=40)
    console = TrialsConsole("nas-1", tmp_path / "nas-1", 120, terminal=terminal, clock=clock)
    for trial in range(5):
        name = f"nas-1-{trial}"
        console.show(
            TrialStarted(trial=trial, config={}, parent=None, attempt=1, rung=None, name=name)
        )
        if trial == 0:
            continue  # a trial of one worker has no journal
        with Journal(tmp_path / name / "journal.jsonl") as journal:
            journal.append(
                RunStarted(name=name, seed=0, config={}, scaling={"num_workers": 3}, versions={})
            )
            journal.append(GenerationFormed(generation=1, members=(0, 1, 2), cause="start"))
            journal.append(WorkerLost(worker=1, rank=1, generation=1, cause="killed by signal 9"))
            journal.append(GenerationFormed(generation=2, members=(0, 2), cause="loss"))
            journal.append(
                Recovered(
                    worker=0, generation=2, step=7, outcome="accepted", rebuild_s=0.1, stall_s=0.2
                )
            )

    def lines():
        rows = terminal.render_lines(console._block())
        texts = ["".join(segment.text for segment in row) for row in rows]
        return [text for text in texts if text.startswith("group")]

    shown = lines()
    assert [text.split()[2] for text in shown] == ["1", "2", "3"]  # three at most
    assert "gen 2   workers 2/3" in shown[0]
    assert "killed by signal 9, recovered in 0.20 s, 0 steps lost" in shown[0]
    console.show(TrialLost(trial=2, attempt=1, cause="died"))
    assert [text.split()[2] for text in lines()] == ["1", "3", "4"]


def test_a_campaign_that_had_nothing_to_do_says_so_and_what_makes_it_go_on():
    begun = next(events())
    console, file, _ = console_of(tty=False)
    console.show(replace(begun, known=120))
    console.show(CampaignEnded(outcome="finished", trials=120, best=58))
    assert "nas-1 is finished; nothing to do   trials 120 done" in file.getvalue()
    assert "larger Budget(trials=..)" in file.getvalue()
    assert "  best  trial 58, as before\n" in file.getvalue()
    console, file, clock = console_of(tty=False)
    play(console, clock)
    console.show(CampaignEnded(outcome="finished", trials=120, best=58))
    assert "nothing to do" not in file.getvalue()
    assert "as before" not in file.getvalue()


@pytest.mark.parametrize("outcome", ["finished", "interrupted"])
def test_when_a_campaign_is_over_no_trial_is_running(outcome):
    """Its time was up, or somebody stopped it: they begin again when it goes on."""
    console, file, _ = console_of(tty=False)
    console.show(next(events()))
    console.show(TrialStarted(trial=0, config={}, parent=None, attempt=1, rung=None))
    console.show(CampaignEnded(outcome=outcome, trials=0, best=-1))
    assert f"{outcome}   trials 0 done \N{MIDDLE DOT} 1 unfinished" in file.getvalue()


@pytest.mark.parametrize("width", [40, 120])
def test_the_block_never_has_more_than_twelve_lines(width):
    console, _, clock = console_of(tty=True, width=width)
    heights = []

    def look():
        rows = console._terminal.render_lines(console._block())
        heights.append(len(rows))
        assert all(sum(segment.cell_length for segment in row) <= width for row in rows)

    play(console, clock, look=look)
    assert console._live is not None
    console.show(CampaignEnded(outcome="finished", trials=120, best=58))
    assert console._live is None
    assert max(heights) <= 12


def test_a_log_has_what_matters_and_a_summary_each_half_minute():
    console, file, clock = console_of(tty=False)
    play(console, clock)
    console.show(CampaignEnded(outcome="finished", trials=120, best=58))
    text = file.getvalue()
    first, *_, last = text.splitlines()
    for line in (first, last):
        assert "nas-1" in line
        assert "elastix report nas-1 --store runs/store" in line
    assert "\x1b" not in text
    summaries = [line for line in text.splitlines() if "trials/s" in line]
    assert clock.now // 30 - 2 <= len(summaries) <= clock.now // 30
    assert " <- " in text
    assert "inherited " in text
    assert text.count(" failed: RuntimeError") == 3
    assert " done (3 failed) " in text  # they are among those that are done
    assert "campaign show nas-1 --store runs/store --failed\n" in text
    assert "lost: died; it starts again" in text
    assert all("store 1.2 GB (dedup 6.3x)" in line for line in summaries[1:])


def test_of_a_campaign_that_goes_on_only_failures_of_now_are_counted_as_such():
    console, file, _ = console_of(tty=False)
    first, *others = events()
    console.show(replace(first, known=20))  # nobody has said how many of those failed
    ended = [event for event in others if isinstance(event, TrialEnded)]
    failed = next(event for event in ended if event.state == "failed")
    for event in (failed, replace(ended[0], trial=failed.trial + 1)):
        console.show(event)
    console.show(CampaignEnded(outcome="finished", trials=22, best=0))
    assert "22 done (1 of 2 new failed) " in file.getvalue()


def test_a_campaign_without_trials_models_and_failures_tells_of_none():
    console, file, _ = console_of(tty=False)
    console.show(StoreMeasured(logical_bytes=0, unique_bytes=0, physical_bytes=94_200))
    console.show(CampaignEnded(outcome="finished", trials=0, best=-1))
    assert "store 94.2 kB\n" in file.getvalue()
    assert "no trial came to an end within this Budget\n" in file.getvalue()
    assert "--failed" not in file.getvalue()


def test_a_failed_campaign_ends_with_its_first_failure():
    console, file, clock = console_of(tty=False)
    play(console, clock)
    console.show(
        CampaignEnded(outcome="failed", trials=9, best=-1, message="what to do next:\n\n  in train")
    )
    end = file.getvalue().split("nas-1 failed", 1)[1]
    assert "first failure: trial 6: RuntimeError: shapes" in end
    assert "what to do next:\n" in end
    assert "\n    in train\n" in end


def test_nothing_from_a_user_steers_the_terminal():
    console, file, clock = console_of(tty=False)
    play(console, clock, evil="\x1b[2J[red]")
    assert "\x1b" not in file.getvalue()
    assert "[red]" in file.getvalue()


def test_starved_and_refused_trials_are_counted_and_the_first_are_told():
    console, file, _ = console_of(tty=False)
    (begun,) = (event for event in events() if isinstance(event, CampaignStarted))
    console.show(begun)
    nothing = {"values": {}, "metrics": {}, "ref": "", "best": False, "inherited": 0.0}
    numbers = {"epochs": 0.0, "lineage_epochs": 0.0, "seconds": 0.0}
    for trial in range(5):
        why = {"state": "refused", "message": "it would hold about 9 GB"}
        console.show(TrialEnded(trial=trial, **why, **nothing, **numbers))
        console.show(TrialStarted(trial=trial + 9, config={}, parent=None, attempt=1, rung=None))
        console.show(
            TrialStarved(trial=trial + 9, times=1, peak_bytes=5, reserved_bytes=10**9, cause="no")
        )
    console.show(CampaignEnded(outcome="finished", trials=5, best=-1, message=""))
    text = file.getvalue()
    assert text.count("refused: it would hold about 9 GB") == 3
    assert text.count("ran out of memory; it starts again with 1.0 GB") == 3
    assert "0 done \N{MIDDLE DOT} 5 refused" in text
    assert "5 starved\N{RIGHTWARDS ARROW}again" in text


def test_a_trial_that_pauses_again_and_again_is_one_trial():
    console, file, _ = console_of(tty=False)
    (begun,) = (event for event in events() if isinstance(event, CampaignStarted))
    console.show(begun)

    def start(trial):
        console.show(TrialStarted(trial=trial, config={}, parent=None, attempt=1, rung=1))

    def end(trial, state):
        nothing = {"values": {}, "metrics": {}, "ref": "", "best": False}
        numbers = {"epochs": 1.0, "lineage_epochs": 1.0, "inherited": 0.0, "seconds": 1.0}
        console.show(TrialEnded(trial=trial, state=state, **nothing, **numbers))

    for trial in range(3):
        for _ in range(4):
            start(trial)
            end(trial, "paused")
    start(0)
    end(0, "finished")
    console.show(CampaignEnded(outcome="finished", trials=3, best=-1, message=""))
    assert "trials 1 done \N{MIDDLE DOT} 2 paused" in file.getvalue()


def test_at_the_end_a_control_from_scratch_is_the_best_as_in_the_results():
    console, file, _ = console_of(tty=False)
    console.show(next(events()))
    for number, (score, parent) in enumerate([(0.9, None), (0.8, 0)]):
        console.show(
            TrialStarted(trial=number, config={}, parent=parent, attempt=1, rung=None, name="")
        )
        counts = {"epochs": 1.0, "lineage_epochs": 1.0, "inherited": 0.0, "seconds": 1.0}
        about = {"state": "finished", "metrics": {}, "ref": "", "best": number == 0}
        console.show(TrialEnded(trial=number, values={"accuracy": score}, **about, **counts))
    console.show(CampaignEnded(outcome="finished", trials=1, best=1))
    assert "  best  accuracy 0.8   trial 1 <- 0" in file.getvalue()


def test_a_journal_that_cannot_be_read_does_not_stop_the_thread_that_draws(tmp_path):
    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=120, height=40)
    console = TrialsConsole("nas-1", tmp_path / "nas-1", 120, terminal=terminal)
    console.show(
        TrialStarted(trial=3, config={}, parent=None, attempt=1, rung=None, name="nas-1-3")
    )
    (tmp_path / "nas-1-3").mkdir()
    (tmp_path / "nas-1-3" / "journal.jsonl").write_text("this is no event\n")
    for _ in range(2):
        rows = terminal.render_lines(console._block())
        texts = ["".join(segment.text for segment in row).strip() for row in rows]
        assert "group  trial 3   its journal cannot be read" in texts


def test_a_trial_that_raised_and_is_run_again_is_not_said_to_be_lost():
    console, file, _ = console_of(tty=False)
    console.show(next(events()))
    console.show(TrialLost(trial=2, attempt=1, cause="OSError: busy", raised=True))
    console.show(TrialLost(trial=2, attempt=2, cause="worker 3 died"))
    text = file.getvalue()
    assert "trial 2 raised: OSError: busy; it starts again" in text
    assert "trial 2 lost: worker 3 died; it starts again" in text
    assert "1 lost\N{RIGHTWARDS ARROW}again" in console._trials()
    assert "1 raised\N{RIGHTWARDS ARROW}again" in console._trials()


def test_what_trials_inherited_is_one_number_on_the_console_and_on_the_page():
    """Of those that did, each once, however often it paused."""
    console, file, _ = console_of(tty=False)
    for event in events():
        if isinstance(event, TrialEnded) and event.inherited:
            console.show(replace(event, state="paused", ignored=True))
        if not isinstance(event, CampaignEnded):
            console.show(event)
    console.show(CampaignEnded(outcome="finished", trials=1, best=-1))
    shares = [trial.inherited for trial in campaign().trials if trial.inherited]
    mean = f"{sum(shares) / len(shares):.0%}"
    assert f"{len(shares)} trials inherited {mean} of their bytes on average" in file.getvalue()
    assert f"{len(shares)} trials had a model to inherit from and did not" in file.getvalue()
    (tile,) = (tile for tile in campaign_part.tiles(campaign()) if tile.name == "inherited")
    assert tile.value == mean
    assert f"by {len(shares)} trials" in tile.more

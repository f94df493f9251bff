"""What objects look like in a notebook and at a prompt: short, and a user's text is no markup."""

import torch
from torch import nn

import elastix
from elastix.data.audit import Audit
from elastix.notebook import size, table
from elastix.search.results import Results
from elastix.search.trial import Objectives, Suggestion, Trial, TrialState
from elastix.state import Ref, State
from elastix.store import Store

HOSTILE = "<script>alert(1)</script>"


def large() -> State:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    return State(model.state_dict(), {"step": 3, "note": HOSTILE, "deep": {"er": [1] * 1000}})


def test_a_state_is_a_line_at_a_prompt_and_two_tables_in_a_notebook():
    state = large()
    assert repr(state) == "State(80 tensors of the model, 11.5 kB in all)"
    assert len(repr(state.manifest())) < 80
    html = state._repr_html_()
    assert len(html) < 5000
    assert "... 60 more" in html
    assert "<script>" not in html
    assert repr(State({})) == "State(0 tensors of the model, 0 bytes in all)"


def test_a_ref_is_text_that_a_notebook_shortens(tmp_path):
    with Store(tmp_path) as store:
        ref = store.put(State({"w": torch.ones(2)}))
    assert isinstance(ref, Ref)
    assert repr(ref) == repr(str(ref))
    assert ref._repr_html_() == f'<code title="{ref}">{ref[:12]}</code>'


def test_a_store_tells_of_its_models_and_once_closed_that_it_is_closed(tmp_path):
    with Store(tmp_path) as store:
        ref = store.put(large(), score=0.5)
        store.tag("best", ref)
        html = store._repr_html_()
        assert ref[:12] in html
        assert "best" in html
        assert repr(store) == f"Store({str(tmp_path)!r})"
    assert "not readable" in store._repr_html_()


def test_results_show_the_best_and_escape_what_was_tried():
    trials = tuple(
        Trial(number, Suggestion({"op": HOSTILE}), TrialState.FINISHED, (number / 100,))
        for number in range(30)
    )
    results = Results(Objectives.of("loss", "min"), {"name": "nas"}, trials, (), "store")
    html = results._repr_html_()
    assert "the best 10 of 30 trials" in html
    assert html.count("<tr>") == 11
    assert "<script>" not in html
    assert repr(results) == "Results('nas', 30 trials, best trial 0: loss 0)"
    assert "<script>" not in results.best._repr_html_()
    empty = Results(Objectives.of("loss", "min"), {"name": "nas"}, (), (), "store")
    assert repr(empty) == "Results('nas', 0 trials)"
    assert "the best 0 of 0" in empty._repr_html_()


def test_a_trial_shows_its_configuration_and_what_came_of_it():
    trial = Trial(
        3,
        Suggestion({"op": HOSTILE, "body": [{"kernel": 5}]}, parent_number=1),
        TrialState.FAILED,
        metrics={"loss": 0.25},
        traceback="Traceback:\n  File x\nValueError: too wide\n",
    )
    html = trial._repr_html_()
    assert "<strong>trial 3: failed</strong>" in html
    for name, value in {
        "loss": "0.25",
        "body.0.kernel": "5",
        "made from trial": "1",
        "traceback": "ValueError: too wide",
    }.items():
        assert f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' in html
    assert "<script>" not in html
    assert "traceback" not in Trial(0, Suggestion({}))._repr_html_()


def test_an_audit_has_a_row_for_each_law():
    found = Audit(8, 0, (), "d" * 64, state=(8, "e" * 64))
    html = found._repr_html_()
    for name, text in found.lines.items():
        assert f'<tr><th scope="row">{name}</th><td>{text}</td></tr>' in html
    assert "not counted: 8 steps, 0 lost" in html


def test_a_log_is_a_list_that_a_notebook_shows_as_a_table(tmp_path):
    with Store(tmp_path) as store:
        for number in range(13):
            ref = store.put(State({"w": torch.full((2,), float(number))}), score=number / 4)
        store.tag("latest", ref)
        log = store.log()
        html = log._repr_html_()
        assert html.count("<tr>") == 11
        assert f'<th scope="row">{ref[:12]}</th><td>3</td>' in html
        assert "latest" in html
        assert "3 more" in html
        assert isinstance(log, list)
        assert "more" not in store.log(limit=2)._repr_html_()


def test_sizes_are_what_people_say():
    assert [size(n) for n in (0, 999, 1000, 12_345_678, 5e12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "12.3 MB",
        "5.0 TB",
    ]
    assert "<td>&lt;i&gt;</td>" in table("t", ("a", "b"), [("x", "<i>")])


def test_tab_finds_the_public_names():
    assert set(elastix.__all__) < set(dir(elastix))
    assert elastix.__version__

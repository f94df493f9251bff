"""The report in a real browser: its parts, its looks, and that nothing of a user runs in it."""

import re
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from elastix.events import (
    GenerationFormed,
    Reported,
    RunEnded,
    RunStarted,
    WorkerLost,
    WorkerRaised,
)
from elastix.report.compose import campaign_page, training_page
from elastix.report.page import write
from elastix.report.training import tell
from elastix.report.trials import CampaignRecord, TrialRecord
from elastix.store import Store
from elastix.testing.store_contract import small
from tests.browser import chromium, look, missing, open_page
from tests.report_data import BEGAN, campaign, run_events

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no browser: {missing()}")

EVIL = (
    "<script>window.hacked=1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "</script><script>window.hacked=1</script>",
    "\"><svg onload='window.hacked=1'>",
    '<a href="javascript:window.hacked=1">x</a>',
    "<b>bold</b> %{x} %{customdata} {{7*7}} ${window.hacked=1}",
    "@loss",
)


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def run_page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "report.html"
    write(training_page("digits", Path("runs/store"), tell(run_events()), None, BEGAN), path)
    return path


@pytest.fixture(scope="module")
def campaign_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("campaign")
    with Store(folder / "store") as store:
        store.put(small(1))
        stats = store.stats()
    page = campaign_page(campaign(objectives=2, live=True), Path("runs/store"), stats, BEGAN + 700)
    write(page, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module", params=["run_page", "campaign_file"])
def page(request) -> Path:
    """The one for all tests that look at both, and then the other."""
    return request.getfixturevalue(request.param)


def complaints(browser) -> list[str]:
    """What the browser logged; WebGL on a CPU is slow and says so."""
    logged = browser.get_log("browser")
    return [entry["message"] for entry in logged if "GPU stall" not in entry["message"]]


def shown(browser, path: Path, width: int = 1280, dark: bool = False, again: bool = True) -> None:
    """Load a page; not again, where it stands there as another test that changes nothing left it.

    A page is drawn without a GPU, which takes seconds of a processor.
    """
    look(browser, width, 900, dark)
    if not again and browser.current_url == path.resolve().as_uri():
        until(browser, f"innerWidth === {width}")
        return
    browser.get_log("browser")
    open_page(browser, path)
    assert "failed" not in browser.execute_script(
        "return Object.keys(document.documentElement.dataset)"
    )
    assert complaints(browser) == []


def drawn(browser) -> dict[str, int]:
    """Plots with the number of their traces."""
    return browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('.plot')]"
        ".map(p => [p.id, p._fullData ? p._fullData.length : 0]))"
    )


PAPER = "document.getElementById('membership')._fullLayout.paper_bgcolor"


def until(browser, condition: str) -> None:
    """Wait for a condition of JavaScript."""
    WebDriverWait(browser, 250, 0.05).until(lambda b: b.execute_script(f"return {condition}"))


def text_of(browser, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def test_the_parts_of_a_run(browser, run_page):
    shown(browser, run_page, again=False)
    plots = drawn(browser)
    assert set(plots) == {
        *("membership", "goodput", "curve-0", "curve-1"),
        *("usage-cpu", "usage-memory", "parts"),
    }
    assert all(plots.values())
    assert text_of(browser, "h1") == "digits finished"
    assert "1,200" in text_of(browser, ".tiles")
    first = browser.find_elements(By.CSS_SELECTOR, ".tiles > div")[0].text
    assert first.startswith("accuracy")
    assert "best, step" in first
    goodput = browser.find_element(By.CSS_SELECTOR, ".tiles > div[title^='Committed samples']")
    assert "since the group formed" in goodput.text
    assert len(browser.find_elements(By.CSS_SELECTOR, "#workers-table tbody tr")) == 14
    bars = browser.execute_script(
        "return document.getElementById('membership')._fullData.find(t => t.type == 'bar').y.length"
    )
    assert bars == 14
    assert len(browser.find_elements(By.CSS_SELECTOR, "#losses tbody tr")) == 7
    assert "Every sample was used exactly once" in text_of(browser, "#audit")
    assert text_of(browser, "#audit-table tbody").split() == [
        "0",
        "6,000",
        "288,000",
        "48",
        *("0", "0"),  # repeated, missing
        *("0", "0"),  # left out, no pass of their own
    ]
    assert len(browser.find_elements(By.CSS_SELECTOR, "#states-table tbody tr")) == 6
    assert not browser.find_elements(By.ID, "live")


def test_light_and_dark(browser, run_page):
    colours = {}
    for dark in (False, True):
        shown(browser, run_page, dark=dark, again=dark)
        colours[dark] = browser.execute_script(
            "const p = document.getElementById('membership');"
            "return [getComputedStyle(document.body).backgroundColor,"
            "p._fullLayout.paper_bgcolor, p._fullLayout.font.color, p._fullData[0].marker.color]"
        )
    assert all(a != b for a, b in zip(colours[False], colours[True], strict=True))
    look(browser, 1280, 900, dark=False)  # it follows without being loaded again
    until(browser, f"{PAPER} === '{colours[False][1]}'")


def test_no_button_sends_the_data_anywhere(browser, page):
    shown(browser, page, again=False)
    buttons = browser.execute_script(
        "return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title || '')"
    )
    assert any("Download" in title for title in buttons), "there are buttons"
    assert not [title for title in buttons if "Share" in title or "Cloud" in title]


def test_no_page_is_wider_than_the_window(browser, page):
    shown(browser, page, width=1920, again=False)
    for width in (1920, 768, 360):
        look(browser, width, 900, dark=False)
        until(browser, f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")


def test_it_asks_for_nothing_from_the_network(browser, page):
    shown(browser, page, again=False)
    asked = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert [name for name in asked if not name.startswith(("data:", "blob:"))] == []
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", page.read_text())


def test_the_parts_of_a_campaign(browser, campaign_file):
    shown(browser, campaign_file, again=False)
    plots = drawn(browser)
    parts = {"history", "time", "pareto", "importance", "parallel", "lineage", "trial-curves"}
    assert set(plots) == parts
    assert all(plots.values())
    assert len(browser.find_elements(By.CSS_SELECTOR, "#trials-table tbody tr")) == 120
    assert "elastix report nas-1" in text_of(browser, "#live")
    assert "saved by sharing tensors" in text_of(browser, "#store-table")
    assert browser.find_elements(By.CSS_SELECTOR, "#parallel canvas")


def test_the_table_sorts_by_numbers_and_back(browser, campaign_file):
    shown(browser, campaign_file, again=False)

    def column(place: int) -> list[str]:
        return browser.execute_script(
            "return [...document.querySelectorAll('#trials-table tbody tr')]"
            f".map(r => r.cells[{place}].textContent)"
        )

    heads = browser.find_elements(By.CSS_SELECTOR, "#trials-table th button")
    names = [head.get_attribute("textContent") for head in heads]
    for name in ("accuracy", "lr"):
        place = names.index(name)
        for order, down in (("ascending", False), ("descending", True)):
            browser.execute_script("arguments[0].click()", heads[place])
            numbers = [float(text.replace(",", "")) for text in column(place) if text]
            assert numbers == sorted(numbers, reverse=down)
            assert len(numbers) < 120 or "" not in column(place)
            assert "" not in column(place)[: len(numbers)]  # what is not known comes last
            header = heads[place].find_element(By.XPATH, "..")
            assert header.get_attribute("aria-sort") == order
    place = names.index("activation")
    browser.execute_script("arguments[0].click()", heads[place])
    assert column(place) == sorted(column(place))


def test_what_goes_on_to_the_right_fades_there_until_it_has_been_read(browser, campaign_file):
    shown(browser, campaign_file, width=360, again=False)
    more = "[...document.querySelectorAll('[data-more]')].map(box => box.querySelector('[id]')?.id)"
    until(browser, f"{more}.includes('trials-table') && {more}.includes('lineage')")
    table = "document.getElementById('trials-table').parentNode"
    assert browser.execute_script(f"return getComputedStyle({table}).maskImage") != "none"
    browser.execute_script(f"{table}.scrollLeft = 1e6")
    until(browser, f"!{more}.includes('trials-table') && {more}.includes('lineage')")
    look(browser, 1400, 900, dark=False)
    until(browser, f"!{more}.includes('lineage')")


def evil_run() -> list:
    events = [
        RunStarted(
            t=BEGAN,
            name=EVIL[0],
            seed=0,
            config={evil: evil for evil in EVIL},
            scaling={"num_workers": 2},
            versions={EVIL[1]: EVIL[2]},
        ),
        GenerationFormed(t=BEGAN + 1, generation=1, members=(0, 1), cause=EVIL[1]),
        *(e for e in run_events(steps=30, ended=False) if not isinstance(e, RunStarted)),
        WorkerLost(t=BEGAN + 9, worker=1, rank=1, generation=1, cause=EVIL[1]),
    ]
    for number, evil in enumerate(EVIL):
        metrics = {evil: float(number), f"{number}": evil}
        events += [Reported(t=BEGAN + 10 + n, seq=n, step=n, metrics=metrics) for n in range(3)]
    trace = "\n".join(EVIL)
    events.append(WorkerRaised(t=BEGAN + 20, worker=0, rank=0, step=30, traceback=trace))
    return [*events, RunEnded(t=BEGAN + 21, outcome="failed", step=30, message=EVIL[0])]


def evil_campaign() -> CampaignRecord:
    trials = []
    for number in range(24):
        evil = EVIL[number % len(EVIL)]
        trials.append(
            TrialRecord(
                number=number,
                config={"kind": evil, evil: number, "n": number * 0.1},
                state="finished" if number else evil,
                values=(float(number % 5), float(number)),
                curve=(1.0, 2.0),
                ref=evil,
                parent=number - 1 if number % 3 else None,
                inherited=0.5,
                finished_s=BEGAN + number,
                traceback=None if number else "\n".join(EVIL),
            )
        )
    names = ((EVIL[1], "max"), (EVIL[0], "min"))
    return CampaignRecord(
        name=EVIL[2], objectives=names, trials=tuple(trials), facts={EVIL[3]: EVIL[4]}
    )


@pytest.mark.fast("campaign")
@pytest.mark.parametrize("kind", ["run", "campaign"])
def test_nothing_of_a_user_runs(browser, tmp_path, kind):
    if kind == "run":
        page = training_page(EVIL[3], Path(EVIL[1]), tell(evil_run()), None, BEGAN)
    else:
        page = campaign_page(evil_campaign(), Path(EVIL[1]), None, BEGAN)
    path = tmp_path / "report.html"
    write(page, path)
    shown(browser, path)
    for plot in browser.find_elements(By.CSS_SELECTOR, ".plot"):  # labels that only hover shows
        browser.execute_script(
            "const p = arguments[0]; p.scrollIntoView();"
            "const t = p._fullData.findIndex(t => t.hovertemplate && t.x && t.x.length);"
            "if (t >= 0) Plotly.Fx.hover(p, [{curveNumber: t, pointNumber: 0}])",
            plot,
        )
    assert browser.execute_script("return window.hacked === undefined")
    assert complaints(browser) == []
    scripts = browser.execute_script(
        "return [...document.scripts].filter(s => !s.nonce && !s.type.includes('gzip')).length"
    )
    assert scripts == 0
    for tag in ("img", "svg[onload]", "main b", "main a[href^=javascript]"):
        assert not browser.find_elements(By.CSS_SELECTOR, tag), tag
    body = browser.execute_script("return document.body.textContent")
    assert EVIL[1] in body  # as text, and whole
    assert EVIL[5] in body


def test_why_a_run_failed_can_be_read_to_its_end(browser, tmp_path):
    """The last line of a traceback is one long sentence."""
    events = list(run_events(steps=30, ended=False))
    trace = "Traceback (most recent call last):\nConfigError: " + "a sentence that goes on " * 40
    events.append(WorkerRaised(t=BEGAN + 20, worker=0, rank=0, step=30, traceback=trace))
    events.append(RunEnded(t=BEGAN + 21, outcome="failed", step=30, message="x"))
    path = tmp_path / "report.html"
    write(training_page("digits", tmp_path, tell(events), None, BEGAN + 22), path)
    for width in (1280, 360):
        shown(browser, path, width=width, again=False)
        box = browser.find_element(By.CSS_SELECTOR, "#failure pre")
        assert box.text.endswith("goes on")
        assert browser.execute_script("return arguments[0].scrollWidth", box) <= width


def test_the_policy_would_stop_a_script_that_got_in(browser, run_page, tmp_path):
    """The net below the escapes: without it this very test fails."""
    hole = "<img src=x onerror='window.hacked=1'><script>window.hacked=2</script></main>"
    path = tmp_path / "holed.html"
    path.write_text(run_page.read_text().replace("</main>", hole))
    look(browser, 1280, 900, dark=False)
    open_page(browser, path)
    assert browser.execute_script("return window.hacked === undefined")
    assert any("Content Security Policy" in message for message in complaints(browser))


def test_a_run_that_goes_on_is_refreshed_on_demand(browser, tmp_path):
    path = tmp_path / "report.html"
    for steps in (40, 80):
        training = tell(run_events(steps=steps, ended=False))
        now = training.progress.last_t + 1
        write(training_page("digits", tmp_path, training, None, now), path)
        if steps == 40:
            shown(browser, path)
        else:
            browser.find_element(By.ID, "reload").click()
            until(
                browser,
                "document.querySelector('.tiles > :nth-child(2) dd')?.textContent.startsWith('80')",
            )
            until(browser, "document.documentElement.dataset.drawn !== undefined")
        assert text_of(browser, ".tiles > :nth-child(2) dd").startswith(str(steps))
    assert drawn(browser)["membership"]

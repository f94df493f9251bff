"""Pictures of the report: light and dark, wide and narrow. `python -m tests.screenshots OUT`.

Two pages are of made-up data, so that they have everything; the third is of a real run whose
workers are killed (`--readme`): its membership timeline is the picture in the README
(docs/membership.png), the top of its page the one in docs/reports.md (docs/report.png), where the
same page is also shown narrow and dark, as `elastix serve` serves it (docs/images/serve-*.png).
"""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from elastix.events import RunEnded
from elastix.observe.journal import Journal
from elastix.report import write_report
from elastix.report.compose import campaign_page, training_page
from elastix.report.page import write
from elastix.report.training import tell
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests import trainables
from tests.browser import chromium, look, missing, open_page, wait_drawn
from tests.report_data import BEGAN, campaign, run_events

_SIZES = {"wide": 1360, "narrow": 420}
_README = (1180, 1010)  # pixels of the page's top


def pages(out: Path) -> dict[str, Path]:
    """Files to look at, by name."""
    store, now = Path("runs/store"), BEGAN + 700
    made_up = {
        "run": training_page("digits", store, tell(run_events()), None, now),
        "campaign": campaign_page(campaign(objectives=2, live=True), store, None, now),
    }
    for name, page in made_up.items():
        write(page, out / f"{name}.html")
    return {name: out / f"{name}.html" for name in made_up}


def real_page(out: Path) -> Path:
    """A run of four workers, of which three are killed and replaced."""
    store = out.resolve() / "store"
    shutil.rmtree(store, ignore_errors=True)
    directory = store / "runs" / "survive-a-kill"
    with contextlib.chdir(out):  # the page names the store
        kills = [Kill(worker=w, phase="bucket", step=s) for w, s in ((2, 60), (0, 220), (3, 380))]
        run_local(
            with_kills(trainables.train, kills),
            4,
            config={"samples": 960, "epochs": 16, "batch_size": 24},
            directory=directory,
            replace=True,
            timeout_s=300,
        )
        with Journal(directory / "journal.jsonl") as journal:
            journal.append(RunEnded(outcome="finished", step=640))
        write_report("survive-a-kill", "store", "real.html")
    return out / "real.html"


@contextlib.contextmanager
def served(store: Path) -> Iterator[str]:
    """`elastix serve` on a store: the address with its token."""
    command = [sys.executable, "-m", "tests.integration.serve_driver", "serve", "--json"]
    command += ["--store", str(store), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += server.stdout.readline()
        try:
            yield json.loads(text)["address"]
        finally:
            server.terminate()


def served_pictures(browser: Chrome, address: str) -> None:
    """The list of runs and the page of one: wide and narrow, light and dark."""
    browser.get(address)  # which gives it the token
    for page, path in (("runs", "/"), ("run", "/run/survive-a-kill")):
        for size, width in _SIZES.items():
            for dark in (False, True):
                look(browser, width, 480 if page == "runs" else 900, dark)
                browser.get(address.split("/?")[0] + path)
                wait_drawn(browser)
                target = f"docs/images/serve-{page}-{size}-{'dark' if dark else 'light'}.png"
                browser.save_screenshot(target)
                print(target)


def main(out: Path, readme: bool) -> int:
    """Write PAGE-SIZE-COLOURS.png for each."""
    why = missing()
    if why:
        print(f"no pictures: {why}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    with chromium(local=True) as browser:
        if readme:
            look(browser, *_README, False)
            open_page(browser, real_page(out))
            browser.save_screenshot("docs/report.png")
            browser.find_element(By.CSS_SELECTOR, "figure:has(#membership)").screenshot(
                "docs/membership.png"
            )
            print("docs/report.png", "docs/membership.png", sep="\n")
            with served(out / "store") as address:
                served_pictures(browser, address)
            return 0
        for name, path in pages(out).items():
            for size, width in _SIZES.items():
                for dark in (False, True):
                    look(browser, width, 900, dark)
                    open_page(browser, path)
                    height = browser.execute_script("return document.documentElement.scrollHeight")
                    look(browser, width, height, dark)
                    target = out / f"{name}-{size}-{'dark' if dark else 'light'}.png"
                    browser.save_screenshot(str(target))
                    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "--readme" in sys.argv[2:]))

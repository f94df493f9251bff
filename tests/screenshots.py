"""Pictures of the report: light and dark, wide and narrow. `python -m tests.screenshots OUT`."""

import sys
from pathlib import Path

from elastix.report.compose import campaign_page, training_page
from elastix.report.page import write
from elastix.report.training import tell
from tests.browser import chromium, look, missing, open_page
from tests.report_data import BEGAN, campaign, run_events

_SIZES = {"wide": 1360, "narrow": 420}


def main(out: Path) -> int:
    """Write PAGE-SIZE-COLOURS.png for each."""
    why = missing()
    if why:
        print(f"no pictures: {why}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    store, now = Path("runs/store"), BEGAN + 700
    pages = {
        "run": training_page("digits", store, tell(run_events()), None, now),
        "campaign": campaign_page(campaign(objectives=2, live=True), store, None, now),
    }
    with chromium() as browser:
        for name, page in pages.items():
            path = out / f"{name}.html"
            write(page, path)
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
    sys.exit(main(Path(sys.argv[1])))

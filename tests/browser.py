"""A headless Chromium for tests and screenshots of the report."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE_S = 250.0  # a page is drawn without a GPU, and nothing is answered meanwhile


def missing() -> str:
    """Why there is no browser; empty if there is one."""
    if not any(map(shutil.which, _BROWSERS)):
        return f"none of {', '.join(_BROWSERS)} is installed"
    return "" if shutil.which("chromedriver") else "chromedriver is not installed"


@contextmanager
def chromium(
    width: int = 1280, height: int = 900, dark: bool = False, local: bool = False
) -> Iterator[webdriver.Chrome]:
    """A browser with no network but file://, and this machine's own if it is `local`."""
    rules = "MAP * ~NOTFOUND" + (", EXCLUDE 127.0.0.1" if local else "")
    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, _BROWSERS)))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # CI runs as root
        "--disable-dev-shm-usage",
        "--enable-unsafe-swiftshader",  # parallel coordinates are drawn with WebGL
        f"--host-resolver-rules={rules}",  # whoever asks for the network fails
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    browser.set_script_timeout(_PATIENCE_S)
    try:
        look(browser, width, height, dark)
        yield browser
    finally:
        browser.quit()


def look(browser: webdriver.Chrome, width: int, height: int, dark: bool) -> None:
    """Size and colours, as a person's device would ask for them."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def open_page(browser: webdriver.Chrome, path: Path, timeout_s: float = _PATIENCE_S) -> None:
    """Load a report and wait until it is drawn, or has failed to be."""
    browser.get(path.resolve().as_uri())
    wait_drawn(browser, timeout_s)


def wait_drawn(browser: webdriver.Chrome, timeout_s: float = _PATIENCE_S) -> None:
    """Until the page is drawn, or has failed to be."""
    WebDriverWait(browser, timeout_s, 0.05).until(
        lambda b: b.execute_script(
            "const d = document.documentElement.dataset; return 'drawn' in d || 'failed' in d"
        )
    )

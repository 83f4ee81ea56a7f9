"""Debian's Chromium, driven by selenium, for the tests of pages and for docs/screenshot.py."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SWITCHES = ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run")


def lacking() -> str | None:
    """The reason why no browser can run, or None."""
    if importlib.util.find_spec("selenium") is None:
        return "needs selenium, of the extra 'test'"
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "needs chromium and chromedriver: apt-get install chromium chromium-driver"
    return None


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """A browser with nothing of anyone's in it, but in an empty folder; its console is kept."""
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for switch in (*SWITCHES, f"user-data-dir={folder}"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield running
    finally:
        running.quit()


def screen(browser: Any, width: int, height: int = 800, **features: str) -> None:
    """Give the browser a screen of `width` x `height` pixels, with media features such as prefers_color_scheme="dark"."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

"""The pictures of docs/report.md: `python -m tests.browser.screenshots RUN FIRST SECOND [FOLDER]`.

Of RUN the page in light, in dark and on a phone; of FIRST and SECOND their comparison.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from shardwise.reporting.report import report_comparison, report_run
from shardwise.reporting.run import read_run
from tests.browser.browser import Browser

DESKTOP, PHONE = 1000, 390


def shoot(
    browser: Browser, page: Path, file: Path, width: int, first: str, last: str, dark: bool = False
) -> None:
    """Write the page from the top of one element to the end of another as a PNG."""
    browser.open(page, width, 900, dark)
    browser.resize(width, browser.run("return document.documentElement.scrollHeight"))
    top, end = browser.run(
        "const box = id => document.getElementById(id).getBoundingClientRect();"
        "return [Math.max(0, box(arguments[0]).top - 12), box(arguments[1]).bottom + 12]",
        first,
        last,
    )
    clip = {"x": 0, "y": top, "width": width, "height": end - top, "scale": 1}
    taken = browser.driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "clip": clip}
    )
    file.write_bytes(base64.b64decode(taken["data"]))
    print(f"{file}  {file.stat().st_size / 1024:.0f} KB")


def main(run: Path, first: Path, second: Path, folder: Path) -> None:
    """Make all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    try:
        with tempfile.TemporaryDirectory() as made:
            one = report_run(read_run(run)).write(Path(made) / "one.html")
            compared = report_comparison(read_run(first), read_run(second))
            both = compared.write(Path(made) / "both.html")
            shoot(browser, one, folder / "report-light.png", DESKTOP, "bar", "streams")
            shoot(browser, one, folder / "report-memory.png", DESKTOP, "memory", "units")
            shoot(browser, one, folder / "report-run.png", DESKTOP, "wire", "curves")
            shoot(browser, one, folder / "report-dark.png", DESKTOP, "waterfall", "memory", True)
            shoot(browser, one, folder / "report-phone.png", PHONE, "bar", "streams")
            shoot(browser, both, folder / "report-comparison.png", DESKTOP, "bar", "streams")
    finally:
        browser.stop()


if __name__ == "__main__":
    main(*map(Path, [*sys.argv[1:4], *(sys.argv[4:] or ["docs/images"])]))

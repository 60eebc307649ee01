"""One headless Chromium, driven through its WebDriver."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)  # fmt: skip  # noqa: E501
DRIVER = shutil.which("chromedriver")


class Browser:
    """Opens pages from disk; remembers what they logged and asked the network for."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
            "--disable-background-networking", "--hide-scrollbars", "--force-device-scale-factor=1",
        ):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        self.driver.set_script_timeout(20)

    def open(self, file: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a page in a window of this size."""
        self.logs()  # forget those of the page before
        self.resize(width, height)
        self.prefer("dark" if dark else "light")
        self.driver.get(file.resolve().as_uri())

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.settle()

    def settle(self) -> None:
        """Wait until the page has drawn twice: what happened before has then had its effect."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def logs(self) -> tuple[list[str], list[str]]:
        """What the console says, and every address that was asked for, since the last call."""
        said = [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]
        asked = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked.append(message["params"]["request"]["url"])
        return said, asked

    def stop(self) -> None:
        self.driver.quit()

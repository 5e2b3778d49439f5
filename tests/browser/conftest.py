"""JupyterLab as `make lab` starts it, and a real browser in front of it.

Notebooks are copied first, so that what JupyterLab saves does not land in the project; screenshots stay as evidence in
artifacts/results/browser/. Run by `make test-browser`, which installs a browser where it can.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specter_lab import paths

CONFIG = paths.ROOT / "specter_lab" / "experiments" / "lab" / "jupyter"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENSHOTS = paths.RESULTS / "browser"
TOKEN = "browser-test"
START_S = 120
WINDOW = {"width": 1500, "height": 2200}


def pytest_collection_modifyitems(config, items):
    if "browser" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="a browser runs every notebook: `make test-browser`"))


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Address of a running JupyterLab over a copy of the notebooks."""
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(paths.ROOT / "notebooks", root / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    shutil.copytree(paths.ROOT / "artifacts" / "recorded", root / "artifacts" / "recorded")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "JUPYTER_CONFIG_PATH": str(CONFIG), "JUPYTER_TOKEN": TOKEN, "PYTHONPATH": str(paths.ROOT),
        "JUPYTERLAB_WORKSPACES_DIR": str(root / "workspaces"), "JUPYTERLAB_SETTINGS_DIR": str(root / "settings"),
    }  # fmt: skip
    options = [f"--ServerApp.root_dir={root}", f"--port={port}", "--no-browser", "--LabApp.expose_app_in_browser=True"]
    with (root / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", *options], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(address, server, root / "server.log")
        yield address
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")


@pytest.fixture(scope="session")
def chromium():
    """The system's browser, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: `make test-browser` installs it")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("needs Chromium: install it (on Debian: apt-get install chromium)")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to sandbox for root
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=found, args=[*flags, "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


@dataclass
class Tab:
    """One notebook in the browser; the console's errors are collected on the way."""

    page: object  # playwright's
    name: str
    errors: list[str] = field(default_factory=list)

    def ask(self, script: str) -> object:
        """Evaluate JavaScript in which `notebook` is JupyterLab's notebook widget."""
        return self.page.evaluate(
            f"() => {{ const notebook = window.jupyterapp.shell.currentWidget.content; return {script}; }}"
        )

    def cells(self) -> list[dict]:
        """Type, execution count and outputs of every cell."""
        fields = "type: c.type, count: c.executionCount ?? null, outputs: c.outputs ? c.outputs.toJSON() : []"
        return self.ask(f"[...notebook.model.cells].map(c => ({{{fields}}}))")

    def pictures(self) -> list[str]:
        """Sources of all pictures that are shown."""
        return self.page.eval_on_selector_all(
            ".jp-Notebook img", "all => all.filter(i => i.complete && i.naturalWidth > 0).map(i => i.src)"
        )

    def shoot(self, what: str) -> None:
        """Keep a screenshot."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{self.name}-{what}.png")


@pytest.fixture
def tab(chromium, lab):
    """Opens notebooks by name; their kernels end with the test."""
    context = chromium.new_context(viewport=WINDOW)
    opened = []

    def open_notebook(name: str) -> Tab:
        page = context.new_page()
        tab = Tab(page, name)
        page.on("console", lambda message: tab.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: tab.errors.append(str(error)))
        page.goto(f"{lab}/lab/tree/notebooks/{name}.ipynb?reset&token={TOKEN}", timeout=START_S * 1000)
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=START_S * 1000,
        )
        opened.append(tab)
        return tab

    yield open_notebook
    for tab in opened:
        tab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    context.close()

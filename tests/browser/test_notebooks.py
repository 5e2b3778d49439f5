"""Every notebook in a real browser: it opens with its recorded figure, runs, shows pictures, and its sliders move them."""

import time

import pytest

from specter_lab import paths
from specter_lab.experiments.registry import EXPERIMENTS, LABS

pytestmark = pytest.mark.browser
RUN_S = 900  # a cold cache records windows first
MOVE_S = 60
NEEDS_GPU = "this tier needs"  # what a GPU experiment's notebook says where there is neither GPU nor recorded result
RECORDED = {folder.name for folder in (paths.RECORDED).glob("*")}


def run_all(tab):
    """Use the menu as a reader would, and wait for the last cell. Returns the cells."""
    tab.page.get_by_role("menuitem", name="Run", exact=True).click()
    tab.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    end = time.monotonic() + RUN_S
    while time.monotonic() < end:
        cells = [cell for cell in tab.cells() if cell["type"] == "code"]
        failed = [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
        if failed:
            tab.shoot("failed")
            pytest.fail("\n".join(failed[0]["traceback"]))
        if (
            all(cell["count"] is not None for cell in cells)
            and tab.ask("notebook.model.cells.length") > 0
            and idle(tab)
        ):
            return cells
        time.sleep(1)
    tab.shoot("late")
    pytest.fail(f"not finished within {RUN_S} s")


def idle(tab):
    return (
        tab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status") == "idle"
    )


def move_first_slider(tab):
    """Push the first slider that is not at its end with the arrow keys; the pictures have to change."""
    handle = tab.page.locator(".jp-Notebook .noUi-handle:visible").first
    handle.scroll_into_view_if_needed()
    before = set(tab.pictures())
    at = int(float(handle.get_attribute("aria-valuenow")))
    most = int(float(handle.get_attribute("aria-valuemax")))
    handle.focus()
    handle.press("ArrowLeft" if at >= most else "ArrowRight")
    end = time.monotonic() + MOVE_S
    while time.monotonic() < end:
        if int(float(handle.get_attribute("aria-valuenow"))) != at and set(tab.pictures()) - before:
            return
        time.sleep(0.5)
    pytest.fail("the slider was pushed, and no picture changed")


@pytest.mark.parametrize("name", [*LABS, *EXPERIMENTS])
def test_notebook_in_a_browser(tab, name):
    opened = tab(name)
    if name in RECORDED:
        opened.page.wait_for_function(
            "() => document.querySelector('.jp-Notebook .jp-MarkdownCell img')?.naturalWidth > 0"
        )
    opened.shoot("opened")
    cells = run_all(opened)
    shown = [data for cell in cells for output in cell["outputs"] for data in output.get("data", {})]
    assert "image/png" in shown or opened.pictures()
    if "application/vnd.jupyter.widget-view+json" in shown and opened.page.locator(".jp-Notebook .noUi-handle").count():
        move_first_slider(opened)
    opened.shoot("run")
    assert opened.errors == []

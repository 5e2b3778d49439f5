"""Every notebook in a real browser: it opens with its recorded figure, runs, shows pictures, and its sliders move them."""

import time

import pytest

from specter_lab import paths
from specter_lab.experiments.registry import EXPERIMENTS, LABS

pytestmark = pytest.mark.browser
CELL_S = 900  # of one cell: a cold cache records windows first
MOVE_S = 60
RECORDED = {folder.name for folder in paths.RECORDED.glob("*")}


def run_all(tab):
    """Use the menu as a reader would, and wait for the last cell. Returns the cells."""
    tab.page.get_by_role("menuitem", name="Run", exact=True).click()
    tab.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    done, since = 0, time.monotonic()
    while time.monotonic() < since + CELL_S:
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
        if (now := sum(cell["count"] is not None for cell in cells)) > done:
            done, since = now, time.monotonic()
        time.sleep(1)
    tab.shoot("late")
    pytest.fail(f"a cell did not finish within {CELL_S} s")


def idle(tab):
    return (
        tab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status") == "idle"
    )


def settled(tab):
    """The pictures once nothing is being drawn any more: none for two seconds."""
    still = set(tab.pictures())
    while True:
        time.sleep(2)
        now = set(tab.pictures())
        if now == still and idle(tab):
            return now
        still = now


def wait_for_other_pictures(tab, before):
    end = time.monotonic() + MOVE_S
    while time.monotonic() < end:
        if set(tab.pictures()) - before:
            return
        time.sleep(0.5)
    tab.shoot("still")
    pytest.fail("no picture changed")


def move_sliders(tab):
    """Push every slider by some steps from the keyboard; each time a picture has to change."""
    for handle in tab.page.locator(".jp-Notebook .noUi-handle:visible").all():
        handle.scroll_into_view_if_needed()
        before = settled(tab)
        at, most = (float(handle.get_attribute(f"aria-value{which}")) for which in ("now", "max"))
        handle.focus()
        handle.press("PageDown" if at >= most else "PageUp")
        wait_for_other_pictures(tab, before)
        assert float(handle.get_attribute("aria-valuenow")) != at


def press_play(tab):
    """Press the first play button, if there is one; a picture has to change."""
    buttons = tab.page.locator(".jp-Notebook .widget-play").first.locator("button")
    if buttons.count():
        before = settled(tab)
        buttons.nth(0).click()
        wait_for_other_pictures(tab, before)
        buttons.nth(1).click()


@pytest.mark.parametrize("name", [*LABS, *EXPERIMENTS])
def test_notebook_in_a_browser(tab, name):
    if name in EXPERIMENTS and name not in RECORDED and EXPERIMENTS[name].minutes.get("cpu") is None:
        pytest.skip("nothing recorded yet, and to measure it takes a GPU, or nobody has timed how long")
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
        move_sliders(opened)
        press_play(opened)
    opened.shoot("run")
    assert opened.errors == []

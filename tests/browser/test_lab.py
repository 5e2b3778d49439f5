"""What `make lab` promises: it opens at the first notebook, asks nothing, and lets a browser in again."""

import pytest

from tests.browser.conftest import START_S, TOKEN

pytestmark = pytest.mark.browser


def test_the_lab_opens_at_the_first_notebook_and_asks_nothing(chromium, lab):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{lab}/?token={TOKEN}", timeout=START_S * 1000)
    page.wait_for_selector(".jp-Notebook h1:has-text('Start here')", timeout=START_S * 1000)
    assert page.url.endswith("/lab/tree/notebooks/00-start-here.ipynb")
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel")
    kernel = page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.name")
    assert kernel == "python3" and page.locator(".jp-Dialog, .jp-toast-button").count() == 0
    again = context.new_page()  # later, from a bookmark: no token in the address
    again.goto(f"{lab}/lab/tree/notebooks/lab-what-if.ipynb", timeout=START_S * 1000)
    again.wait_for_selector(".jp-Notebook h1:has-text('What if?')", timeout=START_S * 1000)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    context.close()


def test_a_stranger_is_not_let_in(chromium, lab):
    page = chromium.new_page()
    page.goto(f"{lab}/lab", timeout=START_S * 1000)
    assert "/login" in page.url
    page.close()

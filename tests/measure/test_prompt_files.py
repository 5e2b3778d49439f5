"""Prompts from files of one's own, and one clear sentence for everything that is none."""

import pytest

from specter_lab.errors import UserError
from specter_lab.measure.prompt_files import gather, read_file
from specter_lab.measure.prompts import select


def test_text_files_hold_one_prompt_per_line(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("first prompt\n\n  second, with spaces \n", encoding="utf-8")
    requests = read_file(file)
    assert [(r.id, r.text) for r in requests] == [("mine.txt:1", "first prompt"), ("mine.txt:3", "second, with spaces")]
    assert {r.prompt_set for r in requests} == {"mine"}


def test_json_lines_keep_line_breaks(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "a\\nb", "other": 1}\n{"text": "c"}\n')
    assert [r.text for r in read_file(file)] == ["a\nb", "c"]


def test_sources_are_joined_in_order_and_cut(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(f"prompt {n}" for n in range(5)))
    chosen = gather([str(file), "code"], 3, seed=1)
    assert [r.text for r in chosen[:3]] == ["prompt 0", "prompt 1", "prompt 2"]
    assert chosen[3:] == select(3, sets=["code"], seed=1)
    assert len(gather([str(file)], 100)) == 5


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("empty.txt", b" \n\n", "holds no prompts: write one per line"),
        ("empty.jsonl", b"", "holds no prompts"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), r"is not UTF-8 text \(byte 3\)"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', r"broken.jsonl:2 is not JSON"),
        ("list.jsonl", b'["text"]', "list.jsonl:1 has no text in 'text'"),
        ("field.jsonl", b'{"prompt": "a"}', "field.jsonl:1 has no text in 'text'"),
        ("blank.jsonl", b'{"text": " "}', "blank.jsonl:1 has no text in 'text'"),
        ("table.csv", b"text\na\n", r"is neither a prompt set \(mathematics, .*gsm8k.*\) nor a prompt file"),
    ],
)
def test_what_is_not_a_prompt_file(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        gather([str(tmp_path / name)], 10)


def test_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no prompt file .*missing.txt: check the path"):
        gather([str(tmp_path / "missing.txt")], 10)
    with pytest.raises(UserError, match="'mathematic' is neither a prompt set"):
        gather(["mathematic"], 10)
    with pytest.raises(UserError, match="no prompts: give a .txt or .jsonl file"):
        gather([], 10)
    with pytest.raises(UserError, match="0 requests of every source leave nothing"):
        gather(["code"], 0)

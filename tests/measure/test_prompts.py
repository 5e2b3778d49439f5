import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specter_lab.errors import UserError
from specter_lab.measure import hub_prompts
from specter_lab.measure.prompts import PROMPT_SETS, Request, load_prompts, select, tokenize

GOOD = {"id": "p-1", "source": "s", "licence": "MIT", "text": "one two three"}


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_the_shipped_sets_hold_200_prompts(name):
    requests = load_prompts(name)
    assert len(requests) == 200
    assert all(r.prompt_set == name and r.text and r.licence for r in requests)


def test_selection_is_balanced_deterministic_and_nested():
    small, large = select(5, seed=3), select(40, seed=3)
    assert [r.prompt_set for r in small] == [name for name in PROMPT_SETS for _ in range(5)]
    assert small == select(5, seed=3) and small != select(5, seed=4)
    assert set(small) < set(large) and len(set(large)) == 200
    assert select(5, sets=("code",), seed=3) == [r for r in small if r.prompt_set == "code"]


def test_more_than_there_are():
    with pytest.raises(UserError, match="cannot take 201 requests from 'mathematics': ask for 1 to 200"):
        select(201)


@pytest.mark.parametrize(
    "content, message",
    (
        ("", "holds no prompts"),
        ("{nonsense", "prose.jsonl:1 is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"id": 7}', "no text in 'id'"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"id": "p-2", "text": " "}), "jsonl:2 has no text in 'text'"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD), "uses an id twice"),
    ),
)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "prose.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        load_prompts("prose", tmp_path)


def test_unknown_and_missing_sets(tmp_path):
    with pytest.raises(UserError, match="no prompt set 'poems'"):
        load_prompts("poems")
    with pytest.raises(UserError, match="is missing"):
        load_prompts("prose", tmp_path)


def test_tokens_are_ragged_and_cut(tokenizer):
    requests = [Request("a", "prose", "s", "MIT", text) for text in ("one two three two", "three")]
    tokens = tokenize(requests, tokenizer, max_tokens=3)
    assert [ids.tolist() for ids in tokens.ids] == [[1, 2, 3], [3]]
    assert tokens.num_tokens == 4
    assert tokens.at_least(2).requests == (requests[0],) and len(tokens.at_least(2).ids) == 1
    assert tokenize(requests, tokenizer).num_tokens == 5


def test_nothing_to_tokenize(tokenizer):
    with pytest.raises(UserError, match="no requests"):
        tokenize([], tokenizer)
    with pytest.raises(UserError, match="'empty' has no tokens"):
        tokenize([Request("empty", "prose", "s", "MIT", "")], tokenizer)
    for max_tokens in (0, -5):
        with pytest.raises(UserError, match=f"cut to {max_tokens} tokens leave nothing to read"):
            tokenize([Request("a", "prose", "s", "MIT", "one two")], tokenizer, max_tokens)


def test_hub_prompts_from_a_local_data_set(tmp_path, monkeypatch):
    """`datasets` reads a folder like a hub repository."""
    pytest.importorskip("datasets")
    rows = [{"q": "= Title =", "a": "0"}, {"q": "", "a": "1"}, {"q": "What?", "a": "2"}, {"q": "Why?", "a": "3"}]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    local = hub_prompts.HubSet(str(tmp_path), None, "test", "q", "a", "MIT")
    monkeypatch.setitem(hub_prompts.HUB_SETS, "local", local)
    first, second = hub_prompts.fetch_prompts("local", 2)
    assert (first.id, first.text, first.reference) == ("local-0000", "What?", "2")
    assert second.text == "Why?"
    with pytest.raises(UserError, match="has 2 prompts"):
        hub_prompts.fetch_prompts("local", 3)


def test_unreachable_hub_set(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match="no hub data set 'poems'"):
        hub_prompts.fetch_prompts("poems", 1)
    absent = hub_prompts.HubSet(str(tmp_path / "absent"), None, "test", "q", None, "MIT")
    monkeypatch.setitem(hub_prompts.HUB_SETS, "absent", absent)
    with pytest.raises(UserError, match="it needs a model hub"):
        hub_prompts.fetch_prompts("absent", 1)

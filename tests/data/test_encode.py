"""Word by word gives the ids of the whole text, for both kinds of tokenizer where that is claimed, and for no other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from efla_data.corpus import encode
from efla_data.corpus.encode import TextEncoder, quick_way
from efla_data.corpus.tokenizer import LoadedTokenizer, describe_tokenizer, find_tokenizer, train_tokenizer
from efla_data.errors import DataError
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.data.material import SPACE, many_texts, save_rules, sentencepiece_folder, sentencepiece_rules

ODD = "a the cat\n\t\r\x0b\x1c\x85\u00a0\u2003\u2028\u3000\u200b" + SPACE + "'s 'll 12 é 😀 </s> <0x0A> .,!-—"
texts = st.lists(st.sampled_from([*ODD, "the", " the", " cat", "  ", "\n\n", "'s", "<s>"]), max_size=40).map("".join)


def byte_level() -> LoadedTokenizer:
    return train_tokenizer(many_texts(200) + [ODD] * 5, 400)


def sentencepiece(tmp: Path, **changes: Any) -> LoadedTokenizer:
    return find_tokenizer(str(sentencepiece_folder(tmp, **changes)))


@pytest.fixture(scope="module", params=["metaspace", "gpt2"])
def encoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextEncoder, Tokenizer]:
    loaded = byte_level() if request.param == "gpt2" else sentencepiece(tmp_path_factory.mktemp("tokenizer"))
    whole = Tokenizer.from_str(loaded.backend.to_str())
    whole.encode_special_tokens = True
    return TextEncoder(loaded.backend, describe_tokenizer(loaded, False)), whole


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=texts)
def test_words_give_the_ids_of_the_whole_text(encoders: tuple[TextEncoder, Tokenizer], text: str) -> None:
    encoder, whole = encoders
    assert encoder.quick is not None
    assert encoder.encode(text)[:-1].tolist() == whole.encode(text, add_special_tokens=False).ids


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_any_unicode_text(encoders: tuple[TextEncoder, Tokenizer], text: str) -> None:
    encoder, whole = encoders
    assert encoder.encode(text)[:-1].tolist() == whole.encode(text, add_special_tokens=False).ids


def test_memo_that_overflows_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = sentencepiece(tmp_path)
    info = describe_tokenizer(loaded, False)
    plain = TextEncoder(loaded.backend, info, quick=False)
    monkeypatch.setattr(encode, "MEMO_WORDS", 3)
    monkeypatch.setattr(encode, "MEMO_LENGTH", 4)
    small = TextEncoder(loaded.backend, info)
    for text in many_texts(30):
        assert small.encode(text).tolist() == plain.encode(text).tolist()
    assert small._memo is not None and len(small._memo) <= 3


def without(rules: dict[str, Any], case: str) -> dict[str, Any]:
    """Rules for which words cannot be encoded one by one."""
    rules = copy.deepcopy(rules)
    if case == "entry across words":
        rules["model"]["vocab"]["t" + SPACE] = len(rules["model"]["vocab"])
        rules["model"]["merges"].append(["t", SPACE])
    elif case == "other normaliser":
        rules["normalizer"]["normalizers"].append({"type": "NFKC"})
    elif case == "added token in text":
        content = {"id": len(rules["model"]["vocab"]), "content": "cat sat", "special": False}
        rules["added_tokens"].append({**rules["added_tokens"][0], **content})
    elif case == "dropout":
        rules["model"]["dropout"] = 0.1
    elif case == "entries taken whole":
        rules["model"]["ignore_merges"] = True
    return rules


@pytest.mark.parametrize(
    "case", ["entry across words", "other normaliser", "added token in text", "dropout", "entries taken whole"]
)
def test_slow_way_where_words_are_not_independent(tmp_path: Path, case: str) -> None:
    folder = save_rules(tmp_path, without(sentencepiece_rules(), case), eos_token="</s>")
    loaded = find_tokenizer(str(folder))
    assert quick_way(loaded.backend) is None
    text = "the cat sat at the cat sat"
    if case != "dropout":
        got = TextEncoder(loaded.backend, describe_tokenizer(loaded, False)).encode(text)[:-1].tolist()
        assert got == loaded.backend.encode(text, add_special_tokens=False).ids


def test_line_feed_in_the_vocabulary_is_not_cut_at(tmp_path: Path) -> None:
    rules = sentencepiece_rules()
    for entry in ("\n", "\nthe"):
        rules["model"]["vocab"][entry] = len(rules["model"]["vocab"])
    rules["model"]["merges"].append(["\n", "the"])
    loaded = find_tokenizer(str(save_rules(tmp_path, rules, eos_token="</s>")))
    encoder = TextEncoder(loaded.backend, describe_tokenizer(loaded, False))
    assert encoder.quick is not None and "\n" not in encoder.quick.words.pattern
    text = "cat\nthe\n\ncat"
    ids = encoder.encode(text)[:-1].tolist()
    assert rules["model"]["vocab"]["\nthe"] in ids
    assert ids == loaded.backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("quick", [True, False])
def test_long_stretches_are_cut_and_decode_to_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    monkeypatch.setattr(encode, "LONGEST", 100)
    loaded = byte_level()
    encoder = TextEncoder(loaded.backend, describe_tokenizer(loaded, False), quick=quick)
    for text in ("a" * 1234, " ".join(many_texts(10)), "a" * 150 + " " + "b" * 99, ""):
        assert loaded.backend.decode(encoder.encode(text).tolist()) == text


def test_special_token_that_text_can_spell_is_refused(tmp_path: Path) -> None:
    rules = sentencepiece_rules()
    rules["added_tokens"][2]["special"] = False
    loaded = find_tokenizer(str(save_rules(tmp_path, rules, eos_token="</s>")))
    with pytest.raises(DataError, match=r"'</s>' in a text becomes the special token"):
        TextEncoder(loaded.backend, describe_tokenizer(loaded, False))


def test_truncation_and_padding_of_a_tokenizer_are_ignored(tmp_path: Path) -> None:
    rules = sentencepiece_rules()
    rules["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    loaded = find_tokenizer(str(save_rules(tmp_path, rules, eos_token="</s>")))
    assert len(TextEncoder(loaded.backend, describe_tokenizer(loaded, False)).encode("the cat " * 20)) == 42


def test_ids_take_four_bytes_only_when_they_must() -> None:
    loaded = byte_level()
    info = describe_tokenizer(loaded, False)
    assert TextEncoder(loaded.backend, info).encode("the").dtype == np.dtype("<u2")
    wide = type(info)(**{**vars(info), "vocab_size": 65537})
    assert TextEncoder(loaded.backend, wide).encode("the").dtype == np.dtype("<u4")


def test_tokenizers_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        find_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no tokenizer\.json"):
        find_tokenizer(str(tmp_path / "empty"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match=r"broken\.json is no tokenizer\.json"):
        find_tokenizer(str(tmp_path / "broken.json"))
    rules = sentencepiece_rules()
    rules["model"]["vocab"]["<end>"] = rules["model"]["vocab"].pop("</s>")
    rules["added_tokens"][2]["content"] = "<end>"
    with pytest.raises(DataError, match="names no eos_token"):
        find_tokenizer(str(save_rules(tmp_path / "nameless", rules)))
    assert find_tokenizer(str(save_rules(tmp_path / "named", rules, eos_token="<end>"))).special == {
        "eos_token": "<end>"
    }
    with pytest.raises(DataError, match="has no bos_token"):
        describe_tokenizer(find_tokenizer(str(tmp_path / "named")), add_bos=True)


def test_training_a_tokenizer_repeats() -> None:
    assert byte_level().backend.to_str() == byte_level().backend.to_str()

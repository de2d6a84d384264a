"""The start token: exactly one, as configured, whether or not the tokenizer adds BOS by itself."""

from __future__ import annotations

import pytest

from efla_lm.errors import UserError
from efla_lm.evaluation.tokens import TokenPolicy
from tests.evaluation.material import make_tokenizer

BOS, EOS = 0, 1


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize(("bos", "expected"), [("auto", None), ("always", True), ("never", False)])
def test_contexts_open_with_one_bos_or_none(template: bool, bos: str, expected: bool | None) -> None:
    policy = TokenPolicy(make_tokenizer(template), bos)
    wanted = template if expected is None else expected
    for text in ("river stone", "<s>river stone"):
        written_out = text.startswith("<s>")
        ids = policy.contexts([text])[0]
        assert ids.count(BOS) == (1 if wanted or written_out else 0)
        assert (ids[0] == BOS) == (wanted or written_out)


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("bos", ["auto", "always", "never"])
@pytest.mark.parametrize(("prefix", "token"), [("auto", BOS), ("bos", BOS), ("eos", EOS)])
def test_rolling_text_follows_one_prefix_token(template: bool, bos: str, prefix: str, token: int) -> None:
    policy = TokenPolicy(make_tokenizer(template), bos, prefix)
    context, text = policy.rolling(["river stone light"])[0]
    assert context == [token]
    assert BOS not in text
    assert EOS not in text
    assert policy.tokenizer.decode(text) == "river stone light"


@pytest.mark.parametrize("template", [False, True])
def test_pairs_are_cut_at_the_context(template: bool) -> None:
    policy = TokenPolicy(make_tokenizer(template))
    pairs = [("river stone", " light"), ("river stone ", "light"), ("", "river"), ("   ", "river")]
    encoded = policy.pairs(pairs)
    start = [BOS] if template else []
    assert encoded[0] == encoded[1], "trailing spaces of the context belong to the continuation"
    context, continuation = encoded[0]
    assert context[: len(start)] == start
    assert policy.tokenizer.decode(context[len(start) :]) == "river stone"
    assert policy.tokenizer.decode(continuation) == " light"
    assert encoded[2][0] == [BOS]
    assert policy.tokenizer.decode(encoded[3][1]) == "   river"


def test_a_continuation_that_melts_into_the_context_is_still_scored() -> None:
    policy = TokenPolicy(make_tokenizer(False))
    whole = policy.plain(["river"])[0]
    part = policy.plain(["riv"])[0]
    assert len(whole) <= len(part), "the case needs a merge across the cut"
    context, continuation = policy.pairs([("riv", "er")])[0]
    assert context
    assert continuation
    assert [*context, *continuation] in (whole, [BOS, *whole])


def test_a_tokenizer_without_bos_falls_back_to_eos_and_says_what_it_lacks() -> None:
    tokenizer = make_tokenizer(False)
    tokenizer.bos_token = None
    assert TokenPolicy(tokenizer).prefix_id == EOS
    with pytest.raises(UserError, match="bos=always: the tokenizer has no BOS"):
        TokenPolicy(tokenizer, "always")
    with pytest.raises(UserError, match="prefix=bos: the tokenizer has no BOS"):
        TokenPolicy(tokenizer, prefix="bos")
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="neither a BOS nor an EOS"):
        TokenPolicy(tokenizer)

"""Streaming text against decoding everything at once, and stop strings against a plain search."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launch.text import REPLACEMENT, IncrementalDetokenizer, StopStrings, decode, load_tokenizer

SAMPLE = "To be, or not to be — that is the question. Grüße, 你好世界, 🙂🙃👩‍👩‍👧 naïve café. " * 20


@cache
def _tokenizer():
    """Byte-level BPE with whole, split and shared characters in its tokens, and special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([SAMPLE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def _byte_id(byte: int) -> int:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return _tokenizer().convert_tokens_to_ids(bytes_to_unicode()[byte])


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(borders)]


token_ids = st.one_of(
    st.lists(st.integers(0, 329), max_size=40),
    st.lists(st.integers(2, 257), max_size=40),  # single bytes: mostly no valid UTF-8
    st.text(max_size=12).map(lambda text: _tokenizer().encode(text)),
)


@settings(max_examples=400, deadline=None)
@given(prompt=token_ids, ids=token_ids, chunk=st.integers(1, 5))
def test_pieces_joined_are_the_whole_text(prompt: list[int], ids: list[int], chunk: int):
    tokenizer = _tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pieces = [detokenizer.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == decode(tokenizer, ids)


def test_a_character_comes_when_its_last_byte_does():
    detokenizer = IncrementalDetokenizer(_tokenizer())
    pieces = [detokenizer.push([_byte_id(byte)]) for byte in "a\U0001f600b".encode()]
    assert pieces == ["a", "", "", "", "\U0001f600", "b"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_shows_only_at_the_end():
    detokenizer = IncrementalDetokenizer(_tokenizer())
    assert detokenizer.push([_byte_id(0xF0)]) == ""
    assert detokenizer.flush() == REPLACEMENT


def test_special_tokens_have_no_text():
    tokenizer = _tokenizer()
    ids = [tokenizer.bos_token_id, *tokenizer.encode("hi"), tokenizer.eos_token_id]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids) + detokenizer.flush() == "hi"


@pytest.mark.parametrize("unit", ["a", "ab 你🙂", "\x80", "\xe2\x82"])
def test_cost_per_token_does_not_grow(unit: str, monkeypatch: pytest.MonkeyPatch):
    """Valid text, and bytes that never are any: the window that is decoded stays small."""
    tokenizer = _tokenizer()
    alphabet = bytes(unit, "latin-1") if unit[0] >= "\x80" else unit.encode()
    ids = [_byte_id(byte) for byte in alphabet] * 100
    longest = 0
    plain = tokenizer.decode

    def watched(ids: list[int], **options: object) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return plain(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", watched)
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = detokenizer.push(ids)
    assert longest <= 24
    assert text + detokenizer.flush() == plain(ids)


def _until_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The plain way: grow the text by one character until it ends in a stop string."""
    for end in range(len(text) + 1):
        found = [s for s in stops if s and text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(text=st.text("ab\nc", max_size=30), stops=stop_lists, cuts=st.lists(st.integers(0, 99)))
@example(text="aab", stops=["ab"], cuts=[1, 2])
@example(text="abab\n", stops=["ab\n"], cuts=[1, 2, 3, 4])
@example(text="xaby", stops=["b", "ab"], cuts=[2])
def test_any_cut_gives_the_text_before_the_first_stop(text: str, stops: list, cuts: list):
    expected, matched = _until_stop(text, stops)
    watcher = StopStrings(stops)
    given_out = ""
    for number, piece in enumerate(_pieces(text, cuts), start=1):
        given_out += watcher.push(piece, number)
        assert expected.startswith(given_out), "text was given out that belongs to a stop string"
    given_out += watcher.flush()
    assert (given_out, watcher.matched) == (expected, matched)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 329), max_size=30), start=st.integers(0, 20))
def test_stops_across_token_borders_and_bytes(ids: list[int], start: int):
    """A stop string cut out of the real text, streamed token by token through both parts."""
    tokenizer = _tokenizer()
    text = decode(tokenizer, ids)
    stop = text[start : start + 3]
    if not stop:
        return
    detokenizer, watcher = IncrementalDetokenizer(tokenizer), StopStrings([stop])
    out = ""
    for count, token_id in enumerate(ids, start=1):
        out += watcher.push(detokenizer.push([token_id]), count)
    out += watcher.push(detokenizer.flush(), len(ids)) + watcher.flush()
    assert (out, watcher.matched) == (text[: text.index(stop)], stop)


def test_only_what_may_begin_a_stop_string_is_held_back():
    watcher = StopStrings(["</end>", "stop"])
    assert watcher.push("go </", 1) == "go "
    assert watcher.push("x s", 2) == "</x "
    assert watcher.push("to", 3) == ""
    assert watcher.push("pper", 4) == ""
    assert watcher.matched == "stop"
    assert watcher.push("more", 5) + watcher.flush() == ""


def test_stop_strings_before_min_tokens_are_text():
    watcher = StopStrings(["ab"], min_tokens=3)
    assert watcher.push("ab", 1) == "ab"
    assert watcher.push("a", 2) == ""  # may become a stop string that is complete in time
    assert watcher.push("b!", 3) == ""
    assert watcher.matched == "ab"


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(str(tmp_path)) is None
    assert load_tokenizer(None) is None
    _tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer is not None
    assert decode(tokenizer, tokenizer.encode("Grüße 🙂")) == "Grüße 🙂"

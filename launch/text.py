"""From token ids to text as it streams: complete characters only, and never part of a stop string.

Knows nothing of requests, HTTP or the engine. A checkpoint without a tokenizer is served with token
ids alone, so everything here is optional to its users.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# An unfinished UTF-8 character is at most three bytes, so at most three tokens that carry bytes.
# From this many held tokens on, the text before such a tail is given out even if it is broken.
_MAX_HELD_TOKENS = 8

# Tokens of the prompt that the first output token is decoded after; some tokenizers write a space
# only between words.
_NUM_CONTEXT_TOKENS = 4

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model")


def load_tokenizer(path: str | None) -> "PreTrainedTokenizerBase | None":
    """The Hugging Face tokenizer in a directory; None when there is none.

    Raises whatever ``transformers`` raises for a tokenizer that is there but cannot be loaded.
    """
    if path is None or not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """Text of finished output: special tokens dropped, spaces as the model wrote them."""
    return _decode(tokenizer, list(token_ids))


class IncrementalDetokenizer:
    """Turns one request's output tokens into text piece by piece.

    The pieces joined, with ``flush`` last, are what ``decode`` gives for all tokens at once, when
    the tokenizer's text only grows by appending bytes (true of byte-level vocabularies).

    Why offsets: decoding each token alone loses spaces and splits characters; decoding everything
    each time is quadratic. So the tokens since the last complete character are decoded together
    with the piece before them, and the difference is new. Cost per token does not grow with the
    length of the output.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """prompt_token_ids: what the output continues; never part of the text given out."""
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._window = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        if _decode(tokenizer, self._window).endswith(REPLACEMENT):
            self._window = []  # the prompt breaks off inside a character: nothing to lean on
        self._num_given = len(self._window)  # tokens at the window's start whose text is out
        self._given_text = _decode(tokenizer, self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join(self._push_one(id) for id in token_ids if id not in self._special_ids)

    def flush(self) -> str:
        """The rest at the end of the output; an unfinished character shows as U+FFFD."""
        return self._give(len(self._window), _decode(self._tokenizer, self._window))

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = _decode(self._tokenizer, self._window)
        if not text.endswith(REPLACEMENT):
            return self._give(len(self._window), text)
        if len(self._window) - self._num_given >= _MAX_HELD_TOKENS:
            return self._give_broken(text)
        return ""

    def _give(self, num_tokens: int, text: str) -> str:
        """Give out ``text``, the window's first ``num_tokens``, less what is out already."""
        new_text = text[len(self._given_text) :]
        if new_text or num_tokens == len(self._window):
            self._window = self._window[self._num_given :]
            self._num_given = num_tokens - self._num_given
            self._given_text = _decode(self._tokenizer, self._window[: self._num_given])
        return new_text

    def _give_broken(self, text: str) -> str:
        """Give out bytes that are no text, up to a border between characters near the end."""
        for end in range(len(self._window) - 1, len(self._window) - _MAX_HELD_TOKENS, -1):
            head = _decode(self._tokenizer, self._window[:end])
            tail = _decode(self._tokenizer, self._window[end:])
            if head + tail == text:
                return self._give(end, head)
        return ""


class StopStrings:
    """Ends a text before the first stop string, holding back what may be the start of one.

    The string that is complete first wins, among those the one that starts first, so the result
    does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str], min_tokens: int = 0) -> None:
        """min_tokens: stop strings complete before this many tokens are ordinary text."""
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, num_tokens: int) -> str:
        """The part of the text so far that is certain, beyond what was given out before.

        num_tokens: output tokens so far, those of ``text`` included. After a match (``matched`` is
        set) everything is empty.
        """
        if self.matched is not None:
            return ""
        buffer = self._held + text
        if num_tokens >= self._min_tokens:
            start = self._find(buffer, len(self._held))
            if start is not None:
                self._held = ""
                return buffer[:start]
        num_held = self._num_uncertain(buffer)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str, num_seen: int) -> int | None:
        """Where the first stop string begins that ends later than character ``num_seen``."""
        matches = []
        for stop in self._stop:
            start = buffer.find(stop, max(0, num_seen - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, self.matched = min(matches)
        return start

    def _num_uncertain(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that begins a stop string."""
        longest = min(len(buffer), max(map(len, self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stop if len(stop) > length):
                return length
        return 0


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

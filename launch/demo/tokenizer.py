"""The demo model's tokenizer: one token per byte, in Hugging Face's file format.

Token ids 0 to 255 are the byte values themselves, so that ids can be made without the tokenizer;
the special ids follow. It is a byte-level BPE without merges, because that is the form that the
`tokenizers` library and every server that reads `tokenizer.json` already understand.

No special id is added to a prompt: the model was trained on windows that start anywhere in a text
and has never seen bos. It has seen eos after each document.
"""

import json
from pathlib import Path

BOS_ID = 256
EOS_ID = 257
PAD_ID = 258
VOCAB_SIZE = 264  # 259 ids in use, filled up to a multiple of 8

SPECIAL_TOKENS = {BOS_ID: "<|bos|>", EOS_ID: "<|eos|>", PAD_ID: "<|pad|>"}
# The model continues text and knows no roles: a chat is its messages, one paragraph each.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% endfor %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte value, by value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(256 + idx) for idx, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def save_tokenizer(directory: Path, *, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token_id, token in SPECIAL_TOKENS.items():
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        assert tokenizer.token_to_id(token) == token_id, (token, token_id)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

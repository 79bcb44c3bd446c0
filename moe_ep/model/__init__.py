"""The V3-shaped decoder: rotary embedding, norms, layers and the checkpoint loader."""

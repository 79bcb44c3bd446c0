"""The demo model: a small DeepSeek-V3-shaped mixture of experts, its training and export."""

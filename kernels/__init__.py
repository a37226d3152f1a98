"""LoRA kernels for NVIDIA GPUs in Pallas-Triton, each with a complete plain-JAX form. Imports jax and numpy only.

A LoRA linear is two ops: `lora_shrink` (x @ A^T into split-K partial sums) and `lora_expand` (adds h @ B to y in place).
Dimension letters: T tokens (rows), K input features, N output columns, L layers of a stack, S adapter slots,
R padded rank, n output slices of a fused linear, P split-K parts.
"""

from .lora_expand import lora_expand
from .lora_layout import MAX_RANK, MIN_COMPUTE_CAPABILITY, MIN_RANK, padded_rank, slice_offsets
from .lora_shrink import lora_shrink

__all__ = [
    "MAX_RANK",
    "MIN_COMPUTE_CAPABILITY",
    "MIN_RANK",
    "lora_expand",
    "lora_shrink",
    "padded_rank",
    "slice_offsets",
]

"""A model of tests whose modules carry adapter slots, in plain JAX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lora_jax.config import LoRAConfig
from lora_jax.lora.apply import attach
from lora_jax.lora.sites import GroupShape, LoRASite, group_shapes
from lora_jax.lora.weights import stack_avals


def attach_slots(model: Any, sites: list[LoRASite], slots: int, rank: int, **options: Any) -> dict[str, GroupShape]:
    """Slots of float32; returns the shapes of their groups."""
    groups = group_shapes(sites)
    stacks = stack_avals(groups, LoRAConfig(slots, rank, slots), jnp.float32, None)
    attach(model, sites, groups, stacks, implementation="xla", **options)
    return groups

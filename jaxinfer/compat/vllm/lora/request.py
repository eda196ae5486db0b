"""A request's adapter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoRARequest:
    """An adapter: its name, a number that has no effect here, and its folder or Hub id."""

    lora_name: str
    lora_int_id: int
    lora_path: str

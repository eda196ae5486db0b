"""When decoding goes on by itself on the device, and for how long."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.engine.block_tables import BlockTables
from jaxinfer.engine.step import Chunks


def go_on(chunks: Chunks, tables: BlockTables, max_steps: int) -> Chunks:
    """Returns the chunks with as many tokens to draw as a request wants and free pages hold, at most `max_steps`.

    That is one each unless all decode, and where one has a structure: the mask of its next token comes from the host.
    """
    if not chunks.are_last_tokens or any(request.grammar for request in chunks.requests):
        return chunks
    max_drawn = [1 + tables.extend_ahead(request, max_steps - 1) for request in chunks.requests]
    return replace(chunks, max_drawn=max_drawn)

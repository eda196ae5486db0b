"""When decoding goes on by itself on the device, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxinfer.engine.block_tables import BlockTables
from jaxinfer.engine.step import Chunk, all_decode


def go_on(chunks: Sequence[Chunk], tables: BlockTables, max_steps: int) -> list[Chunk]:
    """Returns the chunks with as many tokens to draw as a request wants and free pages hold, at most `max_steps`.

    That is one each unless all decode, and where one has a structure: the mask of its next token comes from the host.
    """
    if not all_decode(chunks) or any(chunk.request.grammar for chunk in chunks):
        return list(chunks)
    return [replace(chunk, max_drawn=1 + tables.extend_ahead(chunk.request, max_steps - 1)) for chunk in chunks]

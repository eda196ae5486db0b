"""When decoding goes on by itself on the device, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxinfer.engine.block_tables import BlockTables
from jaxinfer.engine.step import Chunk


def go_on(chunks: Sequence[Chunk], tables: BlockTables, max_steps: int) -> list[Chunk]:
    """Returns the chunks with as many tokens to draw as a request wants and free pages hold, at most `max_steps`.

    That is one each unless all decode, and where one has a structure: the mask of its next token comes from the host.
    """
    requests = [chunk.request for chunk in chunks]
    if not all(chunk.num_tokens == 1 and chunk.is_last for chunk in chunks) or any(r.grammar for r in requests):
        return list(chunks)
    wanted = [min(max_steps, request.max_tokens - request.num_output_tokens) for request in requests]
    drawn = [1 + tables.extend_ahead(*pair) for pair in zip(requests, (count - 1 for count in wanted), strict=True)]
    return [replace(chunk, max_drawn=count) for chunk, count in zip(chunks, drawn, strict=True)]

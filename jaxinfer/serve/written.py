"""Answers that are made and written beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.openai.writing import json_pieces
from jaxinfer.serve.bodies import done_in_turn

PIECE_CHARACTERS = 2**18  # sent at a time, so that a slow client's answer is in memory once
LIGHT = 2**12  # numbers, such as token ids and log-probabilities, of an answer that takes some milliseconds


async def written(request: Request, make: Callable[[], dict[str, Any]], num_values: int) -> Response:
    """Returns the response with the JSON object that `make` returns, which has about `num_values` numbers.

    A thread makes it. Those of large answers wait for their turn, as large bodies do.
    """
    if num_values <= LIGHT:
        return WrittenResponse(await asyncio.to_thread(_pieces, make))
    return WrittenResponse(await done_in_turn(request, partial(_pieces, make)))


def _pieces(make: Callable[[], dict[str, Any]]) -> list[bytes]:
    pieces: list[bytes] = []
    texts: list[str] = []
    num_characters = 0
    for text in json_pieces(make()):
        texts.append(text)
        num_characters += len(text)
        if num_characters >= PIECE_CHARACTERS:
            pieces.append("".join(texts).encode())
            texts, num_characters = [], 0
    return [*pieces, "".join(texts).encode()]


class WrittenResponse(Response):
    """An answer in JSON that is sent piece by piece, as its client takes them."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

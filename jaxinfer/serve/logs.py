"""The server's log: a line for each request, without its text, and one about the engine every ten seconds."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.engine.scheduling.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_PATH = 200  # characters
ENGINE_SECONDS = 10.0  # between two lines about the engine
# Probes and scrapes, which would fill the log.
QUIET_PATHS = ("/health", "/ready", "/metrics")


def set_up_logs(form: str) -> None:
    """Writes the log of the process to standard error, as "text" or a JSON object per line."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("jaxinfer.serve").setLevel(logging.INFO)
    # A warning for each wrong byte of a form: a client could fill the log.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


@dataclass
class TokenCount:
    """The tokens of a request so far, and the seconds from its arrival to the first one of its output."""

    num_prompt: int
    arrival: float  # by time.monotonic
    num_output: int = 0
    ttft: float | None = None

    def add(self, num_tokens: int) -> None:
        """Counts tokens of the output that have come now."""
        self.num_output += num_tokens
        if self.ttft is None and num_tokens:
            self.ttft = time.monotonic() - self.arrival


class EngineLog:
    """Logs the engine's rates since the last line, unless it was idle all the time."""

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._last, self._time = metrics, now

    def is_due(self, now: float) -> bool:
        """True if it is time for the next line; `now` has the seconds of a clock."""
        return now - self._time >= ENGINE_SECONDS

    def write(self, metrics: Metrics, now: float) -> None:
        """Logs a line about the engine at this moment."""
        last, seconds = self._last, now - self._time
        self._last, self._time = metrics, now
        found = metrics.num_found_tokens - last.num_found_tokens
        computed = metrics.num_prefill_tokens - last.num_prefill_tokens
        if metrics.num_steps == last.num_steps and not metrics.num_waiting + metrics.num_running:
            return
        fields = {
            "running": metrics.num_running,
            "waiting": metrics.num_waiting,
            "output_tokens_per_second": round((metrics.num_output_tokens - last.num_output_tokens) / seconds, 1),
            "prompt_tokens_per_second": round((found + computed) / seconds, 1),
            "pages_in_use": round(metrics.num_owned_pages / metrics.num_pages, 3) if metrics.num_pages else 0.0,
            "prefix_hits": round(found / max(found + computed, 1), 3),
            "preemptions": metrics.num_preemptions - last.num_preemptions,
        }
        logger.info(
            "engine: %d running, %d waiting, %.1f tokens/s of outputs, %.1f of prompts (%.0f %% from the prefix cache),"
            " %.0f %% of the pages in use",
            fields["running"],
            fields["waiting"],
            fields["output_tokens_per_second"],
            fields["prompt_tokens_per_second"],
            100 * fields["prefix_hits"],
            100 * fields["pages_in_use"],
            extra={"fields": fields},
        )


class RequestLog:
    """Logs the method, path, status, seconds, tenant and tokens of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        state = scope.setdefault("state", {})

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            seconds = round(time.monotonic() - began, 6)
            # As it was sent: decoded, it could have a line end.
            path = scope["raw_path"].decode("ascii", "backslashreplace")[:MAX_PATH]
            fields = {"method": scope["method"], "path": path, "status": status, "seconds": seconds}
            line = f"{scope['method']} {path} {status} {seconds:.3f} s"
            if (client := state.get("client")) is not None:
                fields["tenant"] = client.tenant
                line += f" {client.tenant!r}"
            if (tokens := state.get("tokens")) is not None:
                fields |= {"prompt_tokens": tokens.num_prompt, "output_tokens": tokens.num_output}
                line += f" {tokens.num_prompt} + {tokens.num_output} tokens"
                if tokens.ttft is not None:
                    fields["ttft"] = round(tokens.ttft, 6)
                    line += f", the first after {tokens.ttft:.3f} s"
            logger.info("%s", line, extra={"fields": fields})

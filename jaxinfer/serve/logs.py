"""The server's log: a line for each request, without its text."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

MAX_PATH = 200  # characters
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


class RequestLog:
    """Logs the method, path, status, seconds and tenant of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            seconds = round(time.monotonic() - began, 6)
            client = scope.get("state", {}).get("client")
            # As it was sent: decoded, it could have a line end.
            path = scope["raw_path"].decode("ascii", "backslashreplace")[:MAX_PATH]
            fields = {"method": scope["method"], "path": path, "status": status, "seconds": seconds}
            line = f"{scope['method']} {path} {status} {seconds:.3f} s"
            if client is not None:
                fields["tenant"] = client.tenant
                line += f" {client.tenant!r}"
            logger.info("%s", line, extra={"fields": fields})

"""Keys of clients, each with a tenant, a priority and limits, and the names and origins that may call."""

from __future__ import annotations

import hmac
import json
import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, get_args

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer.engine.frontend.admission import RequestOptions
from jaxinfer.engine.request.request import Priority
from jaxinfer.json_lines import parse_line
from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve import static_page
from jaxinfer.serve.refusals import refusal_response
from jaxinfer.validation import is_real, shown

# Probes of a load balancer have no key, and the page asks for one.
OPEN_PATHS = ("/health", "/ready", *static_page.PATHS)
MINUTE = 60.0
FIELDS = ("key", "tenant", "priority", "max_in_flight", "tokens_per_minute", "metrics")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # which change nothing
MAX_HEAD_BYTES = 2**16


@dataclass(kw_only=True)
class Client:
    """A client by its key: its tenant, the priority of its requests, and its limits.

    Clients of different tenants share no cached prefixes, so none can probe for another's prompts.
    """

    digest: bytes  # of the key, whose text is not kept
    tenant: str
    priority: Priority = "interactive"
    max_in_flight: float = math.inf
    tokens_per_minute: float = math.inf
    reads_metrics: bool = False  # whose differences tell of single requests of other tenants
    num_in_flight: int = 0
    _used: deque[tuple[int, int]] = field(default_factory=deque)  # the last minute's seconds, and the tokens of each
    _lock: Lock = field(default_factory=Lock)  # batches count on threads of their own

    @property
    def name(self) -> str:
        """Tells the key from others without its text."""
        return self.digest.hex()[:16]

    def begin_request(self, *, takes_tokens: bool) -> None:
        """Counts a request that begins; raises RefusedError 429 if the client is at a limit.

        One that takes no tokens may come after those of a minute are used.
        """
        if self.num_in_flight >= self.max_in_flight:
            raise RefusedError(
                429,
                f"{self.num_in_flight} requests of this key are in flight, the most it may have; wait for one to end",
                kind="rate_limit_error",
                code="max_in_flight",
                retry_after=1.0,
            )
        if takes_tokens and (wait := self.seconds_to_tokens()) > 0:
            raise RefusedError(
                429,
                f"this key has used the {self.tokens_per_minute:,} tokens that it may use in a minute",
                kind="rate_limit_error",
                code="tokens_per_minute",
                retry_after=wait,
            )
        self.num_in_flight += 1

    def seconds_to_tokens(self) -> float:
        """Returns the seconds in which some tokens of the last minute are forgotten; 0 below the limit."""
        now = time.monotonic()
        with self._lock:
            self._forget(now)
            if sum(count for _, count in self._used) < self.tokens_per_minute:
                return 0.0
            return self._used[0][0] + MINUTE - now

    def end_request(self) -> None:
        """Counts a request that has ended."""
        self.num_in_flight -= 1

    def count(self, num_tokens: int) -> None:
        """Counts tokens of prompts and outputs towards the limit of a minute."""
        if not num_tokens or math.isinf(self.tokens_per_minute):
            return
        now = time.monotonic()
        with self._lock:
            self._forget(now)
            if self._used and self._used[-1][0] == int(now):
                num_tokens += self._used.pop()[1]
            self._used.append((int(now), num_tokens))

    def _forget(self, now: float) -> None:
        while self._used and self._used[0][0] <= now - MINUTE:
            self._used.popleft()

    def restrict(self, options: RequestOptions) -> RequestOptions:
        """Returns a request's options with the client's tenant, at most its priority, and a cache of its own."""
        own = restricted(options, self.tenant)
        if self.priority == "batch":
            own["priority"] = "batch"
        return own


def restricted(options: RequestOptions, tenant: str) -> RequestOptions:
    """Returns a request's options with a tenant and a cache of its own.

    A `user` in the body names a person behind the client: the tenant is that of the key all the same.
    """
    # Of a text that reads in one way alone, so that no tenant's name and salt are another's.
    own = json.dumps([tenant, options.get("cache_salt")])
    return RequestOptions(**{**options, "tenant": tenant, "cache_salt": sha256(own.encode()).hexdigest()})


def client_of(request: Request) -> Client | None:
    """Returns the client of a request, or None if the server has no keys."""
    return getattr(request.state, "client", None)


def tenant_of(request: Request) -> str | None:
    """Returns the tenant of a request's client, or None if the server has no keys."""
    client = client_of(request)
    return None if client is None else client.tenant


def read_clients(path: str | Path) -> list[Client]:
    """Reads a file of keys: JSON lines with key, tenant, priority, max_in_flight, tokens_per_minute and metrics.

    A key reads the metrics if its line says so, or if all keys are of one tenant. Raises ValueError with the line and
    the way out.
    """
    clients: list[Client] = []
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error}); convert it, and give one JSON object per line") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            client = _client(parse_line(line.encode()))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if any(client.digest == other.digest for other in clients):
            raise ValueError(f"{path}, line {number}: the key is on an earlier line too; give each client its own")
        clients.append(client)
    if not clients:
        raise ValueError(f"{path} has no key, so no client could enter; write a line such as {_EXAMPLE}")
    if len({client.tenant for client in clients}) == 1:
        for client in clients:  # there is no other tenant
            client.reads_metrics = True
    return clients


MIN_KEY = 16  # characters
_EXAMPLE = '{"key": "a long random text", "tenant": "ann"}'


def only_client(key: str) -> Client:
    """Returns the client of a server that has one key, who also reads the metrics; ValueError for an unusable key."""
    digest = _digest(key)
    return Client(digest=digest, tenant=digest.hex()[:16], reads_metrics=True)


def _digest(key: str) -> bytes:
    if len(key) < MIN_KEY:
        raise ValueError(f"the key has {len(key)} characters, which others can guess; give at least {MIN_KEY}")
    if re.search(r"^\s|\s$|[\x00-\x1f\x7f]", key, re.ASCII):
        raise ValueError("the key has a space at an end, or a character that no header holds; give one without")
    return sha256(key.encode()).digest()


def _client(entry: Any) -> Client:
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str) or len(entry["key"]) < MIN_KEY:
        raise ValueError(f"give a JSON object with a key of at least {MIN_KEY} characters, such as {_EXAMPLE}")
    if unknown := sorted(entry.keys() - set(FIELDS)):
        raise ValueError(f"{shown(unknown[0])} is unknown; the fields are {', '.join(FIELDS)}")
    digest = _digest(entry["key"])
    # Clients without a name are tenants of their own.
    tenant, priority = entry.get("tenant", digest.hex()[:16]), entry.get("priority", "interactive")
    if not isinstance(tenant, str):
        raise ValueError(f"tenant={shown(tenant)} is not allowed: give a name as text")
    if priority not in get_args(Priority):
        raise ValueError(f"priority={shown(priority)} is not allowed: give one of {', '.join(get_args(Priority))}")
    limits = {name: entry[name] for name in ("max_in_flight", "tokens_per_minute") if entry.get(name) is not None}
    for name, value in limits.items():
        if not is_real(value) or not 1 <= value < math.inf:
            raise ValueError(f"{name}={shown(value)} is not allowed: give a number of at least 1, or leave it out")
    if not isinstance(reads_metrics := entry.get("metrics", False), bool):
        raise ValueError(f"metrics={shown(reads_metrics)} is not allowed: give true or false")
    return Client(digest=digest, tenant=tenant, priority=priority, reads_metrics=reads_metrics, **limits)


class AccessControl:
    """Lets only requests with a key pass, within the client's limits. Without clients it lets all pass.

    The scope's state has the client for the routes.
    """

    def __init__(self, app: ASGIApp, clients: Sequence[Client]) -> None:
        self._app, self._clients = app, clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._clients or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            client = self._find(scope)
            # What is stored is read, deleted and cancelled at any time.
            takes_tokens = scope["method"] == "POST" and not scope["path"].endswith("/cancel")
            client.begin_request(takes_tokens=takes_tokens)
        except RefusedError as refusal:
            await refusal_response(refusal)(scope, receive, send)
            return
        scope.setdefault("state", {})["client"] = client
        try:
            await self._app(scope, receive, send)
        finally:
            client.end_request()

    def _find(self, scope: Scope) -> Client:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = headers[0].partition(b" ") if headers else (b"", b"", b"")
        digest = sha256(key.strip()).digest()
        found = None
        for client in self._clients:  # all of them, so that the time tells nothing of the key
            if hmac.compare_digest(client.digest, digest):
                found = client
        if found is None or kind.lower() != b"bearer":
            raise RefusedError(
                401,
                "give a key of this server, as the header Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return found


class HostCheck:
    """Refuses requests whose header Host has none of some names. `*` is any name."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope.get("headers", ()) if name == b"host"), None)
        # Browsers always send one.
        if scope["type"] != "http" or given is None or self._hosts & {"*", _host_name(given)}:
            await self._app(scope, receive, send)
            return
        message = f"the server is not called by the name {shown(given.decode('latin-1'))}; give it --allowed-host"
        refusal = RefusedError(400, message, code="host_not_allowed")
        await refusal_response(refusal)(scope, receive, send)


def _host_name(value: bytes) -> str:
    """Returns the name or address of a Host header, without its port."""
    host = value.decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


class OriginCheck:
    """Refuses requests that a page of another origin sends, unless its origin is one of some. `*` is any origin.

    A browser sends forms to any server without asking first. A key protects from that, for the page would need it.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app, self._origins = app, {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or self._is_own(headers):
            await self._app(scope, receive, send)
            return
        origin = shown(headers.get(b"origin", b"").decode("latin-1"))
        message = f"a page of another origin, {origin}, has sent the request; give the server --cors-origin"
        await refusal_response(RefusedError(403, message, code="origin_not_allowed"))(scope, receive, send)

    def _is_own(self, headers: Mapping[bytes, bytes]) -> bool:
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if self._origins & {"*", origin}:
            return True
        site = headers.get(b"sec-fetch-site", b"").lower()
        if site in (b"same-origin", b"none"):
            return True
        # Without these headers no browser has sent it.
        host = headers.get(b"host", b"").decode("latin-1").lower()
        return site != b"cross-site" and (not origin or origin.partition("://")[2] == host)


class HeadCheck:
    """Refuses requests with a head above MAX_HEAD_BYTES, and those whose length two headers say (RFC 9112, 6.1).

    A proxy that goes by the other header would take the rest of such a body for a request of its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (message := _head_fault(scope)):
            response = refusal_response(RefusedError(400, message, code="bad_head"))
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _head_fault(scope: Scope) -> str | None:
    num_bytes = sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + len(scope["raw_path"])
    if num_bytes + len(scope["query_string"]) > MAX_HEAD_BYTES:
        return f"the request's head has more than {MAX_HEAD_BYTES:,} bytes; send fewer headers"
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        return "the request has both Content-Length and Transfer-Encoding; send one"
    return None

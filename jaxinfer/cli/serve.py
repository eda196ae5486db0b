"""`jaxinfer serve`: a server that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import ssl
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxinfer.cli.chat import read_template
from jaxinfer.cli.options import SIZE, from_arguments, read_adapters, read_size, reader
from jaxinfer.config import EngineConfig
from jaxinfer.serve import DRAIN_SECONDS, MAX_BODY_BYTES, MAX_FILE_BYTES
from jaxinfer.validation import as_path, require_int, require_real

if TYPE_CHECKING:
    from jaxinfer import AsyncLLM

SWITCH_SECONDS = 0.001  # /health took 0.1 s at most beside the reading of bodies, and 0.7 s with Python's own 0.005
MAX_WAITING = 1_024  # requests, if nothing else is said: a server's queue has an end


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the server."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port to listen at; 0 takes a free one (default 8000)")
    group.add_argument(
        "--served-name",
        action="append",
        metavar="NAME",
        help="the model's name in requests, its folder's name or id when left out; may be repeated",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="template in Jinja, or the name of one of the checkpoint's templates"
    )
    group.add_argument(
        "--allow-chat-templates",
        action="store_true",
        help="let requests bring chat templates, which are programs; each may hold up the others for a second",
    )
    keys = group.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key", metavar="KEY", help="key that all requests need; other users of the machine see it, unlike --keys"
    )
    keys.add_argument(
        "--keys",
        metavar="FILE",
        help='JSON lines of {"key", "tenant", "priority", "max_in_flight", "tokens_per_minute", "metrics"};'
        " without them all may enter",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="name by which the server may be called, such as a proxy's; * is any; may be repeated",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="origin whose pages may call the server; may be repeated",
    )
    group.add_argument(
        "--max-body-bytes",
        type=reader(read_size, SIZE),
        default=MAX_BODY_BYTES,
        metavar=SIZE,
        help=f"most bytes of a request's body, a sixteenth of all bodies together (default {MAX_BODY_BYTES})",
    )
    group.add_argument(
        "--files",
        metavar="DIR",
        help="folder for uploaded files and batches, which go on after a new start; no batches when it is left out",
    )
    group.add_argument(
        "--max-file-bytes",
        type=reader(read_size, SIZE),
        default=MAX_FILE_BYTES,
        metavar=SIZE,
        help=f"most bytes of an uploaded file (default {MAX_FILE_BYTES})",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=DRAIN_SECONDS,
        metavar="FLOAT",
        help=f"seconds that running requests have after SIGTERM (default {DRAIN_SECONDS:g})",
    )
    group.add_argument("--tls-certificate", metavar="FILE", help="certificate in PEM format, for https")
    group.add_argument("--tls-key", metavar="FILE", help="its key")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="form of the log (default text)")


def serve(arguments: argparse.Namespace) -> None:
    """Loads the model and serves until SIGTERM or Ctrl-C."""
    try:
        import python_multipart  # noqa: F401  FastAPI needs it at the first upload

        from jaxinfer.serve.access import only_client, read_clients
        from jaxinfer.serve.batches.file_store import FileStore
        from jaxinfer.serve.logs import set_up_logs
        from jaxinfer.serve.server import ServerConfig, make_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("jaxinfer"):
            raise
        raise ValueError(f"the server needs {error.name}; run pip install 'jaxinfer[serve]'") from None
    # Mistakes are told before a model is loaded.
    require_int("port", arguments.port, 0, 65_535)
    if not arguments.process_id:  # process 0 alone serves, and the others may be on its machine
        _require_free(arguments.host, arguments.port)
    require_int("max_body_bytes", arguments.max_body_bytes, 1)
    require_int("max_file_bytes", arguments.max_file_bytes, 1)
    require_real("drain_seconds", arguments.drain_seconds, 0.0)
    if (arguments.tls_certificate is None) != (arguments.tls_key is None):
        raise ValueError("--tls-certificate and --tls-key belong together; give both or none")
    if arguments.tls_certificate is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                arguments.tls_certificate, arguments.tls_key
            )
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"--tls-certificate and --tls-key cannot be used: {error}; give files in PEM") from None
    template = read_template(arguments.chat_template)
    clients = [] if arguments.keys is None else read_clients(as_path("--keys", arguments.keys))
    if arguments.api_key is not None:
        clients = [only_client(arguments.api_key)]
    folder = None if arguments.files is None else as_path("--files", arguments.files)
    store = None
    if folder is not None and not arguments.process_id:
        store = FileStore(folder, max_file_bytes=arguments.max_file_bytes)
    vars(arguments).setdefault("max_waiting", MAX_WAITING)
    from jaxinfer.checkpoint import name_of

    named, served = read_adapters(arguments), arguments.served_name or [name_of(arguments.model)]
    if taken := sorted(named.keys() & {*served}):
        raise ValueError(f"--adapter {taken[0]}=… has the name of the model; give the adapter another name")
    config = from_arguments(EngineConfig, arguments)
    from jaxinfer import AsyncLLM
    from jaxinfer.device import require_device

    require_device(arguments.memory_fraction)
    set_up_logs(arguments.log_format)
    llm = AsyncLLM(
        arguments.model,
        config=config,
        dtype=arguments.dtype,
        speculation=arguments.speculation,
        show_progress=not arguments.quiet,
    )
    if folder is not None and store is None:  # another process than the first comes here with an engine of its own
        store = FileStore(folder, max_file_bytes=arguments.max_file_bytes)
    asyncio.run(_load(llm, named))
    server = make_server(
        llm,
        ServerConfig(
            host=arguments.host,
            port=arguments.port,
            served_names=served,
            chat_template=template,
            allows_chat_templates=arguments.allow_chat_templates,
            clients=clients,
            allowed_hosts=arguments.allowed_host or (),
            cors_origins=arguments.cors_origin or (),
            store=store,
            max_body_bytes=arguments.max_body_bytes,
            drain_seconds=arguments.drain_seconds,
            tls_certificate=arguments.tls_certificate,
            tls_key=arguments.tls_key,
        ),
    )
    if not arguments.quiet:
        scheme = "http" if arguments.tls_certificate is None else "https"
        server.on_start = lambda port: print(
            f"jaxinfer: serves at {scheme}://{arguments.host}:{port}/v1\n"
            f"jaxinfer: has a page for the browser at {scheme}://{arguments.host}:{port}/",
            file=sys.stderr,
            flush=True,
        )
    # Collections then look at the objects of requests alone, and not for long, as they hold the interpreter's lock.
    gc.collect()
    gc.freeze()
    # A thread that waits for the lock gets it after a fifth of Python's own time: an answer of /health needs it often.
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        if arguments.warm_up:
            llm.engine_thread.engine.warm_up(show_progress=not arguments.quiet)
        server.run()
        if llm.failure is not None:
            raise RuntimeError("the engine has failed") from llm.failure
    finally:
        asyncio.run(llm.close())


async def _load(llm: AsyncLLM, adapters: Mapping[str, str]) -> None:
    for name, path in adapters.items():
        await llm.load_adapter(name, path)


def _require_free(host: str, port: int) -> None:
    """Raises ValueError if the server could not listen there."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error}; give another --host or --port") from None

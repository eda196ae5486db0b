"""The files under docs/deploy start a server that exists: its options, routes, ports, users and times fit together."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jaxinfer.cli import main as cli
from jaxinfer.serve.access import OPEN_PATHS
from jaxinfer.serve.app import make_app
from jaxinfer.serve.server import CLOSING_SECONDS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "deploy"
CONTAINERFILE = (FOLDER / "Containerfile").read_text()
MANIFEST = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
PAGE = (ROOT / "docs" / "deployment.md").read_text()


def unit() -> configparser.ConfigParser:
    # systemd joins lines that end with a backslash, and its specifiers begin with %.
    text = (FOLDER / "jaxinfer.service").read_text().replace("\\\n", " ")
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string(text)
    return parser


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (document for document in MANIFEST if document["kind"] == kind)
    return found


POD = of_kind("Deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
SERVICE = unit()["Service"]


def instruction(name: str) -> str:
    """The last instruction of that name in the Containerfile."""
    return re.findall(rf"^{name} (.+)$", CONTAINERFILE, re.MULTILINE)[-1]


COMMANDS = {
    "Containerfile": yaml.safe_load(instruction("CMD")),
    "kubernetes.yaml": CONTAINER["args"],
    "jaxinfer.service": shlex.split(SERVICE["ExecStart"])[1:],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_are_those_of_the_command_line(name):
    arguments = cli._parser().parse_args(COMMANDS[name])

    assert arguments.run.__name__ == "serve"
    assert arguments.port == 8000
    assert arguments.log_format == "json"


@pytest.mark.parametrize("name", ["kubernetes.yaml", "jaxinfer.service"])
def test_a_server_has_keys_and_keeps_files_within_its_volumes(name):
    arguments = cli._parser().parse_args(COMMANDS[name])

    places = {
        "kubernetes.yaml": [mount["mountPath"] for mount in CONTAINER["volumeMounts"]],
        "jaxinfer.service": ["%d", "%S/" + SERVICE["StateDirectory"]],
    }[name]
    for path in (arguments.keys, arguments.files):
        assert any(path.startswith(f"{place}/") for place in places)


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_probe_asks_an_open_route_at_the_port_of_the_server(probe):
    app = make_app(SimpleNamespace(identity=dict), ["m"])  # pyright: ignore[reportArgumentType]
    asked = CONTAINER[probe]["httpGet"]

    assert asked["path"] in OPEN_PATHS
    assert asked["path"] in {getattr(route, "path", None) for route in app.routes}
    assert asked["path"] == ("/health" if probe == "livenessProbe" else "/ready")
    assert asked["port"] in {port["name"] for port in CONTAINER["ports"]}


def test_ports_are_the_same_everywhere():
    (port,), (exposed,) = CONTAINER["ports"], of_kind("Service")["spec"]["ports"]

    assert {port["containerPort"], exposed["port"], int(instruction("EXPOSE"))} == {8000}
    assert exposed["targetPort"] == port["name"]
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert of_kind("Service")["spec"]["selector"] == labels == of_kind("Deployment")["spec"]["selector"]["matchLabels"]


def test_a_server_is_killed_only_after_it_has_drained():
    drain = cli._parser().parse_args(CONTAINER["args"]).drain_seconds
    command, pause = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]

    assert command == "sleep"
    assert POD["terminationGracePeriodSeconds"] > int(pause) + drain + CLOSING_SECONDS
    drain = cli._parser().parse_args(COMMANDS["jaxinfer.service"]).drain_seconds
    assert int(SERVICE["TimeoutStopSec"]) > drain + CLOSING_SECONDS
    assert SERVICE["KillSignal"] == instruction("STOPSIGNAL") == "SIGTERM"


def test_no_server_runs_as_root_and_all_have_the_same_user():
    user = POD["securityContext"]["runAsUser"]

    assert user > 0
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert instruction("USER") == f"{user}:{POD['securityContext']['runAsGroup']}"
    assert f"useradd --uid {user} " in CONTAINERFILE
    assert SERVICE["User"] not in ("", "root")


def test_the_cache_of_compiled_steps_is_below_a_volume():
    folder = re.findall(r"JAX_COMPILATION_CACHE_DIR=(\S+)", CONTAINERFILE)[0]

    # Not the volume itself, to which the group may write.
    assert str(Path(folder).parent) in {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert POD["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert SERVICE["Environment"] == f"JAX_COMPILATION_CACHE_DIR=%C/{SERVICE['CacheDirectory']}/compiled"


def test_every_volume_is_mounted_and_every_claim_is_made_or_told():
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in POD["volumes"] if "persistentVolumeClaim" in volume
    }
    made = {document["metadata"]["name"] for document in MANIFEST if document["kind"] == "PersistentVolumeClaim"}

    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    assert claims == made | {"jaxinfer-models"}
    assert volumes["keys"]["secret"]["secretName"] == "jaxinfer-keys"


def test_the_container_is_built_from_files_and_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = re.findall(r"^COPY (.+) \S+$", CONTAINERFILE, re.MULTILINE)
    devices = re.findall(r'^ +([a-z|]+)\) extras="?([a-z,$A-Z]+)"? ;;', CONTAINERFILE, re.MULTILINE)
    extras = {
        device: extras.replace("$DEVICE", device).split(",") for names, extras in devices for device in names.split("|")
    }

    assert [name for line in copied for name in line.split() if not (ROOT / name).exists()] == []
    assert set(extras) == {"cpu", "cuda", "tpu"}
    assert {extra for names in extras.values() for extra in names} <= set(project["optional-dependencies"])
    assert project["readme"] in copied[0]
    assert all(file in copied[0] for file in project["license-files"])


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_the_page_links_each_file(name):
    assert f"](deploy/{name})" in PAGE

"""What an engine will need before it runs; where a model can run, and how fast at best, without weights or devices."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.plan.compiler import CompiledStep
    from jaxinfer.plan.deployment import DeploymentPlan, Layout, compile_plan, plan_deployment
    from jaxinfer.plan.devices import CHIPS, Chip, Devices, HostLink, parse_devices
    from jaxinfer.plan.roofline import StepFigures
    from jaxinfer.plan.short_answer import Answer, Rates, answer

# Loaded when first used: an engine needs little of it.
_MODULES = {
    **dict.fromkeys(("Answer", "Rates", "answer"), "short_answer"),
    "CompiledStep": "compiler",
    **dict.fromkeys(("DeploymentPlan", "Layout", "compile_plan", "plan_deployment"), "deployment"),
    **dict.fromkeys(("CHIPS", "Chip", "Devices", "HostLink", "parse_devices"), "devices"),
    "StepFigures": "roofline",
}

__all__ = [
    "CHIPS",
    "Answer",
    "Chip",
    "CompiledStep",
    "DeploymentPlan",
    "Devices",
    "HostLink",
    "Layout",
    "Rates",
    "StepFigures",
    "answer",
    "compile_plan",
    "parse_devices",
    "plan_deployment",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxinfer.plan' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxinfer.plan.{_MODULES[name]}"), name)

"""What an engine will need before it runs; where a model can run, and how fast at best, without weights or devices."""

from jaxinfer.plan.answer import Answer, Rates, answer
from jaxinfer.plan.compiler import CompiledStep
from jaxinfer.plan.deployment import DeploymentPlan, Layout, compile_plan, plan_deployment
from jaxinfer.plan.devices import CHIPS, Chip, Devices, parse_devices
from jaxinfer.plan.roofline import StepFigures

__all__ = [
    "CHIPS",
    "Answer",
    "Chip",
    "CompiledStep",
    "DeploymentPlan",
    "Devices",
    "Layout",
    "Rates",
    "StepFigures",
    "answer",
    "compile_plan",
    "parse_devices",
    "plan_deployment",
]

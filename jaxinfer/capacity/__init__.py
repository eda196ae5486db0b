"""Plans where a model can run, and how fast at best, without its weights and without the devices."""

from jaxinfer.capacity.answer import Answer, Rates, answer
from jaxinfer.capacity.compiler import CompiledStep
from jaxinfer.capacity.devices import CHIPS, Chip, Devices, parse_devices
from jaxinfer.capacity.plan import DeploymentPlan, Layout, compile_plan, plan_deployment
from jaxinfer.capacity.roofline import StepFigures

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

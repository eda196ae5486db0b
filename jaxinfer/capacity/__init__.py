"""Plans where a model can run, and how fast at best, without its weights and without the devices."""

from jaxinfer.capacity.devices import CHIPS, Chip, Devices, parse_devices
from jaxinfer.capacity.plan import DeploymentPlan, Layout, plan_deployment
from jaxinfer.capacity.roofline import StepFigures

__all__ = [
    "CHIPS",
    "Chip",
    "DeploymentPlan",
    "Devices",
    "Layout",
    "StepFigures",
    "parse_devices",
    "plan_deployment",
]

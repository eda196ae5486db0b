"""Runs traces of requests on a real engine, or on its scheduler alone, and reports latency and throughput."""

from jaxinfer.simulation.driver import drive
from jaxinfer.simulation.plot import plot_timeline, require_matplotlib
from jaxinfer.simulation.real_engine import RealEngine
from jaxinfer.simulation.report import Report, prediction_errors
from jaxinfer.simulation.simulated_engine import SimulatedEngine, load_simulated_engine
from jaxinfer.simulation.step_times import StepTimes, fit_step_times, measured_steps, require_known_steps
from jaxinfer.simulation.trace import MAX_LEN, TracedRequest, random_trace, read_trace

__all__ = [
    "MAX_LEN",
    "RealEngine",
    "Report",
    "SimulatedEngine",
    "StepTimes",
    "TracedRequest",
    "drive",
    "fit_step_times",
    "load_simulated_engine",
    "measured_steps",
    "plot_timeline",
    "prediction_errors",
    "random_trace",
    "read_trace",
    "require_known_steps",
    "require_matplotlib",
]

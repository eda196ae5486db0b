"""The options of a step: all that its executable depends on beside the shapes of its arrays."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from jax.sharding import Mesh

from jaxinfer.model.config import ModelConfig
from jaxinfer.model.params import check_mesh
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.sampling_params import FORMS, Form
from jaxinfer.validation import as_ints, require, require_bool, require_int, require_name, shown

# Every step takes them; `draw_step`, which has no layers, needs only some.
_OF_ALL = frozenset({"config", "custom", "implementation", "mesh"})


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The static options of a step.

    The numbers of a step's tokens and turns, `q_len`, `num_steps`, `max_drafts` and `vocab_size`, are for the one step
    that describes them. A step refuses options that it has no use for.

    Raises ValueError for a value that no step takes.
    """

    config: ModelConfig
    form: Form = "full"  # of drawing, see `jaxinfer.steps.steps`
    max_log_probs: int = 0  # most alternatives that a row asks for; in the full form only
    max_prompt_log_probs: int = 0  # most alternatives for each token of a prompt
    # The output also has the tokens' log-probabilities in the distribution that they are drawn from.
    sampling_log_probs: bool = False
    custom: tuple[LogitsProcessor, ...] = ()  # functions of the names in `make_sampling`; in the full form only
    kept_layers: tuple[int, ...] = ()  # the states for drafters, see `forward_with_states`
    implementation: str | None = None  # a kernel of paged attention; None: the best
    mesh: Mesh | None = None  # the mesh that parameters and cache are split over, if any
    q_len: int | None = None  # of `verify_step`: most tokens of a row, its drafts and the one before them
    num_steps: int | None = None  # of `decode_loop`
    max_drafts: int | None = None  # of `draft_step`: tokens per row
    vocab_size: int | None = None  # of `draft_step`: that of the sampling; None: the model's

    def __post_init__(self) -> None:
        require(isinstance(self.config, ModelConfig), "config", self.config, "the ModelConfig of `load_checkpoint`")
        require(self.mesh is None or isinstance(self.mesh, Mesh), "mesh", self.mesh, "a jax.sharding.Mesh or None")
        if self.mesh is not None:
            check_mesh(self.mesh)
        require_name("form", self.form, FORMS)
        require_bool("sampling_log_probs", self.sampling_log_probs)
        for name in ("max_log_probs", "max_prompt_log_probs"):
            require_int(name, getattr(self, name), 0, self.config.vocab_size)
        for name in ("q_len", "num_steps", "max_drafts", "vocab_size"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1)
        are_functions = isinstance(self.custom, tuple) and all(map(callable, self.custom))
        require(are_functions, "custom", self.custom, "a tuple of functions")
        is_name = self.implementation is None or isinstance(self.implementation, str)
        require(is_name, "implementation", self.implementation, "the name of a kernel or None")
        as_ints("kept_layers", self.kept_layers)
        require(isinstance(self.kept_layers, tuple), "kept_layers", self.kept_layers, "a tuple")
        if self.form != "full" and (self.max_log_probs or self.custom):
            raise ValueError(
                f"form={self.form!r} leaves no place for max_log_probs={self.max_log_probs} and"
                f" custom={shown(self.custom)}; give them to draw_step, or draw in the full form"
            )


def check_options(options: Any, step: str, *used: str) -> None:
    """Raises ValueError for options of a step that it does not use, beside the `used` and those of all steps."""
    require(isinstance(options, StepOptions), "options", options, "StepOptions(config=…)")
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in {*used, *_OF_ALL} and field.default is not MISSING and value != field.default:
            raise ValueError(f"{field.name}={shown(value)} is not allowed: {step} has no use for it; leave it out")

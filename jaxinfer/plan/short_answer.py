"""The answer of a plan in numbers: its waits, speeds and prices, as the data sheet bounds them and as measured."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.plan.deployment import DeploymentPlan
from jaxinfer.validation import require_positive, require_real

# A network disk of a cloud, or a download at 8 Gbit/s.
LOAD_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speeds and the price of a layout.

    * `first_token_seconds`: the steps of a prompt that runs alone.
    * `tokens_per_second_alone`: of a user who is alone.
    * `tokens_per_second_each`, `tokens_per_second_all`: of each user and of all, if all rows of all replicas decode.
    * `dollars_per_million_tokens`: of the output at that speed; None without a price.
    """

    first_token_seconds: float
    tokens_per_second_alone: float
    tokens_per_second_each: float
    tokens_per_second_all: float
    dollars_per_million_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The figures of a plan's recommended layout.

    * `num_devices`: all that are paid, idle ones and those of other replicas too.
    * `num_tokens`, `num_users`: the tokens in the pages and the rows in the steps of all replicas.
    * `is_memory_bound`: True if a decode step reads longer than it multiplies.
    * `bound`: by the data sheet. `expected`: by the measured parts of its rates; None for a device without them.
    * `compile_seconds`: None, because the start of an engine with the rows of a plan is not measured yet.
    """

    tensor: int
    experts: int
    stages: int
    num_replicas: int
    num_devices: int
    num_tokens: int
    num_users: int
    is_memory_bound: bool
    bound: Rates
    expected: Rates | None
    load_seconds: float
    load_bytes_per_second: float
    dollars_per_hour: float | None
    compile_seconds: float | None = None


def answer(
    plan: DeploymentPlan,
    *,
    num_replicas: int = 1,
    price: float | None = None,
    load_bytes_per_second: float = LOAD_BYTES_PER_SECOND,
) -> Answer | None:
    """Returns the numbers of a plan's best layout; None if none fits.

    The plan is that of each of `num_replicas` copies. `price`: dollars of a device for an hour. A load reads the
    checkpoint once, at `load_bytes_per_second`. Raises ValueError for a price or rate that is none.
    """
    require_positive("load_bytes_per_second", load_bytes_per_second)
    if price is not None:
        require_real("price", price, 0)
    best = plan.best
    if best is None or best.decode is None or best.decode_alone is None or best.first_token_seconds is None:
        return None
    num_devices = (plan.devices.count or best.num_devices) * num_replicas
    dollars = None if price is None else price * num_devices

    seconds, seconds_alone = best.decode.seconds, best.decode_alone.seconds
    first_token_seconds = best.first_token_seconds

    def rates(decode_part: float, prefill_part: float) -> Rates:
        each = decode_part / seconds
        total = each * best.num_rows * num_replicas
        return Rates(
            first_token_seconds=first_token_seconds / prefill_part,
            tokens_per_second_alone=decode_part / seconds_alone,
            tokens_per_second_each=each,
            tokens_per_second_all=total,
            dollars_per_million_tokens=None if dollars is None else dollars / 3600 / total * 1e6,
        )

    measured = plan.devices.chip.measured
    return Answer(
        tensor=best.tensor,
        experts=best.experts,
        stages=best.stages,
        num_replicas=num_replicas,
        num_devices=num_devices,
        num_tokens=best.num_tokens * num_replicas,
        num_users=best.num_rows * num_replicas,
        is_memory_bound=best.decode.is_memory_bound,
        bound=rates(1, 1),
        expected=None if measured is None else rates(measured.decode, measured.prefill),
        load_seconds=plan.checkpoint_bytes / load_bytes_per_second,
        load_bytes_per_second=load_bytes_per_second,
        dollars_per_hour=dollars,
    )

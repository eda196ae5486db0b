"""Acceptance rates: how often drafts are right, for the drafter as a whole and for each request."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.engine.request.request import Request
from jaxinfer.engine.scheduling.drafts import Drafts, first_of, rest_of

# The rate of an unknown drafter, and that of a second guess for a position whose first guess is wrong.
FIRST_RATE, FIRST_RANK_RATE = 0.5, 0.25
# The weight of an earlier draft falls by this factor with each later one: texts change.
REQUEST_MEMORY, DRAFTER_MEMORY = 0.97, 0.995
# A request begins at the drafter's rate, with the weight of this many drafts of its own.
PRIOR_WEIGHT = 3.0


class Acceptance:
    """The rate of right drafts among those whose predecessors were all right; later drafts count more."""

    def __init__(self, rate: float, memory: float) -> None:
        self._num_right, self._num_drafts, self._memory = rate * PRIOR_WEIGHT, PRIOR_WEIGHT, memory

    @property
    def rate(self) -> float:
        return self._num_right / self._num_drafts

    def enter(self, is_right: bool) -> None:
        self._num_right = self._num_right * self._memory + is_right
        self._num_drafts = self._num_drafts * self._memory + 1


class AcceptanceRates:
    """Compares drafts with the tokens that follow, whether they are verified or not, and predicts later drafts."""

    def __init__(self) -> None:
        self._of_drafter = Acceptance(FIRST_RATE, DRAFTER_MEMORY)
        self._of_request: dict[int, Acceptance] = {}
        self._of_rank: list[Acceptance] = []  # of second, third, … guesses for a position, if those before are wrong
        self._pending: dict[int, Drafts] = {}  # by request id: drafts for its next tokens

    def expect(self, request: Request, drafts: Drafts) -> None:
        """Takes the drafts for the request's next tokens; drops earlier ones."""
        self._pending[request.request_id] = drafts

    @property
    def is_waiting(self) -> bool:
        """True if any draft is still to be compared."""
        return any(self._pending.values())

    def compare(self, request: Request, token_ids: Sequence[int]) -> None:
        """Compares the request's drafts with its next tokens."""
        pending = self._pending.get(request.request_id)
        if not pending:
            return
        own = self._of(request)
        for token_id in token_ids:
            for rank, draft in enumerate(first_of(pending)):
                is_right = token_id == draft
                for acceptance in (own, self._of_drafter) if rank == 0 else (self._of_guess(rank),):
                    acceptance.enter(is_right)
                if is_right:
                    break
            pending = rest_of(pending, token_id)
        self._pending[request.request_id] = pending

    def likelihoods(self, request: Request, parents: Sequence[int]) -> list[float]:
        """Returns the probability of each draft that the request emits it: it and all drafts before it are right.

        `parents` gives the drafts' tree as `DraftTree.parents`; a range stands for consecutive tokens, whose
        probabilities are the powers of the request's rate.
        """
        rate = self._of(request).rate
        if isinstance(parents, range):
            return [rate**length for length in range(1, len(parents) + 1)]
        rates = [rate, *(rank.rate for rank in self._of_rank)]
        likelihoods: list[float] = []
        left: dict[int, tuple[float, int]] = {}  # by parent: the probability that no guess so far is right; guesses
        for parent in parents:
            likelihood, rank = left.get(parent) or (1.0 if parent < 0 else likelihoods[parent], 0)
            likelihoods.append(likelihood * (rates[rank] if rank < len(rates) else FIRST_RANK_RATE))
            left[parent] = (likelihood - likelihoods[-1], rank + 1)
        return likelihoods

    def forget(self, request: Request) -> None:
        """Drops the state of a request that has ended."""
        self._of_request.pop(request.request_id, None)
        self._pending.pop(request.request_id, None)

    def _of(self, request: Request) -> Acceptance:
        found = self._of_request.get(request.request_id)
        if found is None:
            found = self._of_request[request.request_id] = Acceptance(self._of_drafter.rate, REQUEST_MEMORY)
        return found

    def _of_guess(self, rank: int) -> Acceptance:
        while len(self._of_rank) < rank:
            self._of_rank.append(Acceptance(FIRST_RANK_RATE, DRAFTER_MEMORY))
        return self._of_rank[rank - 1]

"""Budgets of runs of agents, and what they have spent of them."""

import dataclasses

from jaxshare.argument_checks import as_float


@dataclasses.dataclass
class Spent:
    """Model calls, their tokens and their price, of a run and of all that it has spawned."""

    calls: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    cost: float = 0.0

    def add(self, calls: int, new_tokens: int, prompt_tokens: int, cost: float) -> None:
        """Counts more."""
        self.calls += calls
        self.new_tokens += new_tokens
        self.prompt_tokens += prompt_tokens
        self.cost += cost


@dataclasses.dataclass(frozen=True)
class Budget:
    """The budget of one run of an agent and all that it spawns; None is no limit.

    The calls of a child, a judge or a voter count against the budgets of all runs above it, as
    well as its own: once any of them is used up, the child asks the model no more. It then ends by
    its best answer so far, or by a BudgetError, which its parent meets where it awaits the child.

    Attributes:
      calls: limit of model calls; each of n answers is one, and each retry. A firing that would
        need one more is given up, and the run ends when nothing else can go on.
      tokens: limit of generated tokens, with the same effect once it is reached; answers that are
        under way at that time are completed and still counted.
      seconds: limit of wall time; work that is under way at its end is cancelled, and children end.
      money: limit of the prices of answers, in the unit of `Reply.cost`, with the effect of tokens.
        A model that gives no prices is an error; `jaxshare.serving.agents.backends.Priced` gives
        them by the token.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    money: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not as_float(f"{field.name} of a budget", value) > 0:
                raise ValueError(
                    f"{field.name} of a budget is {value}; give a number above 0, or None for no "
                    "bound"
                )

    def used_up(self, spent: Spent, calls: int) -> str | None:
        """The part of it that does not allow so many calls more, in words; None if all do."""
        if self.calls is not None and spent.calls + calls > self.calls:
            return f"{self.calls} calls"
        if self.tokens is not None and spent.new_tokens >= self.tokens:
            return f"{self.tokens} tokens"
        if self.money is not None and spent.cost >= self.money:
            return f"{self.money} of money"
        return None

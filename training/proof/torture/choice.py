"""What a tortured run is, beside what is done to it: recipe, ranks, interval, how it saves.

Each is dealt from a deck that is shuffled anew when it is used up, so that even a short series has
every card. Recipe and ranks change the bits: such a run is held against the uninterrupted one of
its own recipe and ranks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

T = TypeVar("T")
# streamed: as on a host whose memory cannot hold a copy of the state.
Saving: TypeAlias = Literal["staged", "streamed"]
SAVINGS: tuple[Saving, ...] = ("staged", "staged", "streamed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Of one run."""

    recipe: str
    num_processes: int
    interval: str
    saving: Saving

    @property
    def cards(self) -> dict[str, str]:
        """As counted in the report."""
        return {
            "recipe": self.recipe,
            "ranks": str(self.num_processes),
            "interval": self.interval,
            "save": self.saving,
        }


class Choices:
    """Deals one run after the other."""

    def __init__(
        self,
        rng: random.Random,
        *,
        recipes: Sequence[str],
        num_processes: Sequence[int],
        intervals: Sequence[str],
    ) -> None:
        self._recipes = Deck(rng, recipes)
        self._num_processes = Deck(rng, num_processes)
        self._intervals = Deck(rng, intervals)
        self._savings = Deck(rng, SAVINGS)

    def draw(self) -> Choice:
        """The next run's."""
        return Choice(
            recipe=self._recipes.draw(),
            num_processes=self._num_processes.draw(),
            interval=self._intervals.draw(),
            saving=self._savings.draw(),
        )


class Deck(Generic[T]):
    """Deals cards in a random order, every one before any comes again."""

    def __init__(self, rng: random.Random, cards: Sequence[T]) -> None:
        self._rng = rng
        self._cards = cards
        self._left: list[T] = []

    def draw(self) -> T:
        """The next card."""
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()

    def put_back(self, card: T) -> None:
        """Deal this one next: it was drawn in vain."""
        self._left.append(card)

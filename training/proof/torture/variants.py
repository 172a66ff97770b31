"""The variants of a tortured run: recipe, ranks, interval, and how it saves.

Each property is drawn from a deck that is reshuffled when it is empty, so that even a short series
has every value. Recipe and ranks change the bits: a run is compared with the uninterrupted one of
its own recipe and ranks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

T = TypeVar("T")
# streamed: as on a host without memory for a copy of the state.
Saving: TypeAlias = Literal["staged", "streamed"]
SAVINGS: tuple[Saving, ...] = ("staged", "staged", "streamed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The properties of one run."""

    recipe: str
    num_processes: int
    interval: str
    saving: Saving

    @property
    def labels(self) -> dict[str, str]:
        """The properties by name, as counted in the report."""
        return {
            "recipe": self.recipe,
            "ranks": str(self.num_processes),
            "interval": self.interval,
            "save": self.saving,
        }


class VariantDeck:
    """Draws the variants of successive runs."""

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

    def draw(self) -> Variant:
        """The variant of the next run."""
        return Variant(
            recipe=self._recipes.draw(),
            num_processes=self._num_processes.draw(),
            interval=self._intervals.draw(),
            saving=self._savings.draw(),
        )


class Deck(Generic[T]):
    """Draws cards in random order, each one before any is repeated."""

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
        """Return a card that could not be used, to be drawn next."""
        self._left.append(card)

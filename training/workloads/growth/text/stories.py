"""The project's own corpus: small stories, each a pure function of (seed, number).

The grammar can be learned in minutes, and there is enough variety for perplexity to be meaningful.
Names, things and places recur within a story, so a model that looks back predicts them better. A
plot is a sequence of steps, a step a list of ways to tell it; words in braces are chosen per story.
They stand in stories.txt: beginnings, weather and endings, then the plots, two empty lines apart;
each step of a plot after an empty line, each way to tell it on a line.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from training import derive_seed

# The size of an average story in UTF-8.
STORY_BYTES = 390


def _words(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


_GIRLS = _words("Mia Anna Lily Zoe Nora Ella Ruth Ida Clara June Lucy Rosa")
_BOYS = _words("Tom Ben Max Sam Leo Finn Otto Jack Paul Hugo Noah Adam")
_ANIMALS = _words("cat dog rabbit fox duck bear mouse frog horse owl hedgehog turtle")
_SIZES = _words("little small big young old tiny")
_NATURES = _words("kind brave shy clever quiet curious happy careful")
_COLORS = _words("red blue green yellow white brown purple silver")
_THINGS = _words("ball kite boat drum book cup lamp bell basket key hat blanket")
_FOODS = _words("bread soup cake apples honey pancakes berries cheese")
_SKILLS = _words(
    "swim, ride a bicycle, sing, climb the old tree, skip stones, whistle, read, dance", ", "
)
_SOUNDS = _words("tap scratch bump squeak splash rattle")
_DAYS = _words("two three four five six seven")
# Where a story happens, and where things and animals can be found there.
_PLACES: Mapping[str, Sequence[str]] = {
    "in the garden": ("under a bush", "behind the apple tree", "beside the wall"),
    "in the forest": ("between two roots", "in a hollow tree", "under the leaves"),
    "by the river": ("behind a stone", "in the tall grass", "under the bridge"),
    "at the farm": ("in the hay", "behind the barn", "under a cart"),
    "on the beach": ("in a small cave", "under a boat", "behind a rock"),
    "in the park": ("under a bench", "behind the fountain", "in the sand"),
    "at home": ("under the bed", "behind the door", "in a box"),
}
_PRONOUNS: Mapping[str, Sequence[str]] = {
    "girl": ("she", "her", "her"),
    "boy": ("he", "him", "his"),
    "animal": ("it", "it", "its"),
}

_Words: TypeAlias = dict[str, str]


def write_story(seed: int, number: int) -> str:
    """Write story `number` of the corpus `seed`."""
    rng = random.Random(derive_seed("story", seed, number))
    place = rng.choice(list(_PLACES))
    spot, other_spot = rng.sample(_PLACES[place], 2)
    hero, friend = _two_characters(rng)
    words = {
        **hero,
        **{f"friend_{key}": word for key, word in friend.items()},
        "place": place,
        "Place": _capitalized(place),
        "spot": spot,
        "other_spot": other_spot,
        "thing": f"{rng.choice(_COLORS)} {rng.choice(_THINGS)}",
        "food": rng.choice(_FOODS),
        "skill": rng.choice(_SKILLS),
        "sound": rng.choice(_SOUNDS),
        "days": rng.choice(_DAYS),
        "nature": rng.choice(_NATURES),
    }
    weather = [_WEATHER] if rng.random() < 0.4 else []
    steps = [_BEGINNINGS, *weather, *rng.choice(_PLOTS), _ENDINGS]
    return " ".join(_capitalized(rng.choice(step).format(**words)) for step in steps)


def _two_characters(rng: random.Random) -> tuple[_Words, _Words]:
    """Draw a hero with a name, and a friend: a child with another name, or an animal."""
    kind = rng.choice(("girl", "boy"))
    name = rng.choice(_GIRLS if kind == "girl" else _BOYS)
    hero = _character(name, name, kind)
    hero["what"] = _with_article(f"{rng.choice(_SIZES)} {kind}")
    other = rng.choice(("girl", "boy", "animal", "animal"))
    if other == "animal":
        animal = rng.choice(_ANIMALS)
        met = _with_article(f"{rng.choice(_SIZES)} {animal}")
        return hero, _character(f"the {animal}", met, other)
    friend = rng.choice([n for n in (_GIRLS if other == "girl" else _BOYS) if n != name])
    return hero, _character(friend, friend, other)


def _character(name: str, first_called: str, kind: str) -> _Words:
    he, him, his = _PRONOUNS[kind]
    return {
        "name": name,
        "first": first_called,
        "he": he,
        "him": him,
        "his": his,
        "Name": _capitalized(name),
        "He": _capitalized(he),
    }


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


_TEXTS = Path(__file__).with_name("stories.txt").read_text(encoding="utf-8").split("\n\n\n")
(_BEGINNINGS, _WEATHER, _ENDINGS), *_PLOTS = (
    [step.splitlines() for step in text.split("\n\n")] for text in _TEXTS
)

"""The project's own corpus: small stories, each a pure function of (seed, number).

The grammar can be learned in minutes, and there is enough variety for perplexity to be meaningful.
Names, things and places recur within a story, so a model that looks back predicts them better. A
plot is a sequence of steps, a step a list of ways to tell it; words in braces are chosen per story.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from training import derive_seed

# The size of an average story in UTF-8.
STORY_BYTES = 390
_Step: TypeAlias = Sequence[str]


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
    steps = [BEGINNINGS, *([WEATHER] if rng.random() < 0.4 else []), *rng.choice(_PLOTS), ENDINGS]
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


def _steps(text: str) -> Sequence[_Step]:
    """Parse steps, which are separated by empty lines; each line is one way to tell a step."""
    return [step.splitlines() for step in text.strip().split("\n\n")]


BEGINNINGS, WEATHER, ENDINGS = _steps(
    """
Once upon a time there was {what} named {name}.
There was {what} called {name}.
{name} was {what}, and {he} was very {nature}.
Once there was {what}. {He} was called {name} and {he} was very {nature}.

The sun was warm and the sky was blue.
It was raining a little.
A soft wind was blowing.
It was early and everything was still.
The birds were singing.

They laughed and went home together.
From that day on they were best friends.
And {name} slept very well that night.
It was a good day.
Then they ate {food} until it was dark.
{name} never forgot that day.
"""
)

_PLOTS: Sequence[Sequence[_Step]] = [
    _steps(
        """
{name} loved {his} {thing}.
{name} had a {thing} and took it everywhere.

One day {he} played {place}, and the {thing} was gone.
One morning {he} was {place} and could not find the {thing}.

"Where is my {thing}?" {he} cried.
{name} was sad and began to cry.
"Oh no," said {name}, "I have lost my {thing}."

{He} looked {other_spot}, but it was not there.
First {he} looked {other_spot}. There was nothing.

Then {friend_first} came. "I can help you," said {friend_name}.
{friend_first} heard {him} and came to help.

{friend_name} looked {spot}, and there was the {thing}!
Together they looked {spot}. "Here it is!" said {friend_name}.

"Thank you, {friend_name}," said {name}.
{name} was so happy that {he} hugged {friend_name}.
"""
    ),
    _steps(
        """
One day {he} sat {place} with some {food}.
{name} took some {food} and went to eat it {place}.

{friend_first} was sitting {spot} and looked hungry.
{spot} {he} saw {friend_first}, who had nothing to eat.

"Do you want some {food}?" asked {name}.
"You can have half of my {food}," said {name}.

{friend_name} ate and smiled.
"Yes, please," said {friend_name}. They ate it all.

The next day {friend_name} came back with a {thing}. It was for {name}.
Then {friend_name} gave {him} a {thing}, because {he} had been so kind.
"""
    ),
    _steps(
        """
One day {he} walked {place} and heard a small voice.
{name} was playing {place} when somebody called for help.

{friend_first} was stuck {spot}.
It was {friend_first}, who was caught {spot}.

"Please help me," said {friend_name}, "I am afraid."
"I have been here for {days} hours," said {friend_name}.

{name} pulled and pulled, but it was too hard.
{name} was not strong enough at first.

Then {he} had an idea. {He} took {his} {thing} and used it to push.
Then {he} tried again with all {his} strength.

At last {friend_name} was free.
And then, with a {sound}, {friend_name} was out!

"You are very {nature}," said {friend_name}.
"Thank you! You are my friend now," said {friend_name}.
"""
    ),
    _steps(
        """
One night {name} could not sleep, because there was a noise.
In the evening {he} heard something strange {place}.

{sound}, {sound}, {sound}! It came again.
It went {sound}, and then {sound} again.

"Is it a monster?" {he} asked {him}self.
{name} was scared and held {his} {thing} close.

But {he} was {nature}, so {he} took a lamp and looked {other_spot}. Nothing.
Slowly {he} went to look {other_spot}. Nobody was there.

Then {he} looked {spot}. It was only {friend_first}!
{spot} sat {friend_first}, who was just as scared.

"I was looking for {food}," said {friend_name}.
"I am sorry," said {friend_name}, "I only wanted to play."
"""
    ),
    _steps(
        """
{friend_first} had a new {thing} and showed it to {name}.
One day {name} was allowed to play with the {thing} of {friend_first}.

{name} ran with it {place}, and it fell and broke.
But {he} was not careful {place}, and the {thing} broke.

{He} wanted to hide it {spot}.
At first {he} put it {spot} and said nothing.

But {his} heart was heavy, and {he} told the truth.
Then {he} went to {friend_name} and said, "I broke your {thing}. I am sorry."

"Thank you for telling me," said {friend_name}. "We can mend it."
{friend_name} was sad, but not angry.

They worked for {days} hours, and the {thing} was as good as new.
Together they made the {thing} whole again.
"""
    ),
    _steps(
        """
{name} wanted to learn to {skill}, but {he} could not do it.
All {his} friends could {skill}. Only {name} could not.

"It is too hard," {he} said.
{He} tried {place} and failed.

{friend_first} saw it and said, "Try it every day."
"I will show you," said {friend_first}.

So {name} tried again, for {days} days.
They met {place} every morning for {days} days.

Then, suddenly, {he} could {skill}! "Look at me!" {he} called.
And one day {he} could {skill} better than {friend_name}.

{friend_name} was very proud of {him}.
As a prize {name} got a {thing}.
"""
    ),
]

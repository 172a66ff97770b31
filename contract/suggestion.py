"""The suggestion that an error message makes in place of an unknown name."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return "did you mean X?" with up to `most` names near `name`, else all known ones."""
    names = list(known)
    near = get_close_matches(name, names, n=most, cutoff=cutoff)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known are {', '.join(names) or 'none'}"

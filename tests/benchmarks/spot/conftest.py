"""What this machine once asked AWS is none of these tests' business either."""

from tests.sizing.conftest import no_cache

__all__ = ["no_cache"]

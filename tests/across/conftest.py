"""Fixtures of rooms, for tests that join them with others."""

from tests.sizing.conftest import no_cache as no_cache
from tests.stacks.conftest import synthesize as synthesize
from tests.stacks.conftest import templates as templates
from tests.training.conftest import dataset as dataset
from tests.training.conftest import finished as finished

"""Commands may be called in tests of managers, too."""

import pytest

from tests.cli.commands import Shell
from tests.cli.commands import shell as run_command


@pytest.fixture
def shell() -> Shell:
    return run_command

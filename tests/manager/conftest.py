"""Commands may be called in tests of managers, too."""

from tests.cli.conftest import shell

__all__ = ["shell"]

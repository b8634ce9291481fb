"""What the tests share: real ranks (:mod:`tests.harness.ranks`). Nothing here is part of the package."""

"""What the tests share: real ranks (:mod:`tests.support.ranks`). Nothing here is part of the package."""

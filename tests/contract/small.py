"""Small methods, under the name that tests know."""

from fedstill.testing import small

__all__ = ["small"]

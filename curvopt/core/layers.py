"""Modules that older tutorials import from here."""

from torch.nn import Flatten

__all__ = ["Flatten"]

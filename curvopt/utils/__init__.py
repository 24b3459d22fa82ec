"""Helpers for examples and tutorials."""

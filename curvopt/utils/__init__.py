"""Helpers of examples and tutorials, and of what ranks send."""

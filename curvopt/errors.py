"""Errors and warnings of curvopt."""


class CurvoptError(RuntimeError):
    """A request the library refuses because the answer would be wrong; the message names where, what and the remedy."""


class CurvoptWarning(UserWarning):
    """Something the numbers do not contain, or that is slower than the user may expect."""

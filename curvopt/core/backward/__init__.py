"""One backward of the user, and what is computed along with it."""

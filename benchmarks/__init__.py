"""Scripts that check or measure one claim each and print a table."""

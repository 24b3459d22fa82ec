"""Scripts that train and compare: ``python -m experiments.train --help``, ``python -m experiments.compare --help``."""

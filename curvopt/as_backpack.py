"""Lets curvopt serve ``import backpack``, so that programs written for BackPACK run unchanged.

::

    import curvopt.as_backpack  # before everything that imports backpack
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

Raises:
    ImportError: if the real package was imported before.
"""

from curvopt.compat.serving import serve

serve()

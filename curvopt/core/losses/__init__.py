"""Losses and the roots of their Hessians.

::

    known ──► terms of a known kind, read off the graph
    any   ──► the remainder, by double backward
    ──► roots: S with S S^T = the Hessian in the outputs of the network
"""

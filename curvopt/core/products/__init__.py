"""Products of Jacobians with vectors, in factored form, and their reductions.

::

    Outer     sum_s left ⊗ right    linear layers, convolutions, recurrent matrices
    Lookup    left at picked rows   embeddings
    Dense     [V, N, *p]            biases, scales, and all else
"""

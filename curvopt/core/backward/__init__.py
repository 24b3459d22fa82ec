"""One backward pass of the user, and the quantities that are computed along with it.

::

    intercept ──► context ──► backward_pass ──► checks ──► second_order ──► residuals
    into autograd  backpack   reads, sweeps     refuse     columns          Hessian less GGN
"""

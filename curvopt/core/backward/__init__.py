"""One backward pass of the user, and the quantities that are computed along with it.

::

    backpack ──► located_graph ──► request_checks ──► backward_pass ──► second_order, sweep
    the context  read, locate      check              owns the totals   factor, pull back and reduce
"""

"""The engine: it computes quantities along with a backward pass.

::

    extend, record      the forward pass: records of calls, on the nodes of the graph
    nodes, graph        the graph of one backward pass
    operations, vjp     all that is known of operations; pulling vectors back
    samples             finding the samples in the graph
    losses              roots of loss Hessians
    layers, products    from vectors at the output of a layer to products of its parameters
    backward            the stages of one backward pass, which call all of these
"""

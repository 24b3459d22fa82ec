"""The engine: it computes quantities along with a backward pass.

::

    record              the forward pass: records of calls, on the nodes of the graph
    graph, samples      reading the graph, and finding the samples in it
    losses              roots of loss Hessians
    layers, products    from vectors at the output of a layer to products of its parameters
    backward            the stages of one backward pass, which call all of these
"""

"""The batch axis of every tensor of a backward pass.

::

    samples         what the model was called with: N, and the heads
    propagation     from the heads to all tensors behind, by operation_rules and indexing_rules, else by probe
    layout          Layout(3, 2, 5): a tensor [3, 2, 5] with two samples, along axis 1
"""

"""The batch axis of every tensor of a backward pass.

::

    samples         what the model was called with: N, and the heads
    axes            from the heads to all tensors behind, by the rules of operations, else by a probe
    rules, probe    from the layout of an operation's output to the layouts of its operands
    layout          Layout(3, 2, 5): a tensor [3, 2, 5] with two samples, along axis 1
"""

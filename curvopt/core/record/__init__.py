"""Recording in the forward pass which modules were called, on the nodes of the autograd graph.

::

    extend(model)     puts hooks on modules
    model(x)          the hooks put a ModuleCall on the node of each layer's output, a ModelCall on the model's
"""

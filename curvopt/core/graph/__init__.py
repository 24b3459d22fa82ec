"""Reading the autograd graph, and pulling vectors back through it.

::

    nodes, operations                    one node: its name, shape and saved tensors
    backward_graph, parameter_calls      one backward pass: its calls and parameters
    vjp, node_vjp, nonlinear             products with Jacobians, by the engine and node by node, and with Hessians
"""

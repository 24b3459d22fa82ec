"""Reading the autograd graph: its nodes, the operations they differentiate, vector-Jacobian products through them."""

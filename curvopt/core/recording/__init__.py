"""Recording in the forward pass which modules were called, on the nodes of the autograd graph."""

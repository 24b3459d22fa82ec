"""The engine: calls recorded in the forward pass, vector-Jacobian products, Jacobians in factored form."""

"""The engine: uses recorded in the forward, sweeps through autograd, Jacobians in factored form."""

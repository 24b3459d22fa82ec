"""Products of Jacobians with vectors, in factored form."""

"""What programs written for BackPACK import, on top of curvopt; see `curvopt.as_backpack`."""

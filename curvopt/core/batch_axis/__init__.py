"""Where the samples are in every tensor of a backward."""

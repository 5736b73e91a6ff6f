"""A third party's Triton attention under a name that is taken: bound only where an operator says whose is meant."""

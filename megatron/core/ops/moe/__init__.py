"""Operations of expert layers: routing, permutation, grouped products, activations."""

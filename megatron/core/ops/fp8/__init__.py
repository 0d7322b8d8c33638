"""Linear layers that multiply in fp8: formats, quantisation, products, recipes, and the layer itself."""

"""Mixture of experts: a router sends each token to a few of many MLPs (Shazeer et al. 2017; Fedus et al. 2021)."""

"""Hardware that computes wrongly or slowly: results computed again, and ranks that others wait for."""

"""Which ranks form which group: integers first, then groups of torch."""

"""Published models as flags: one TOML file per family, read by `catalogue`. No flags of data, batch or layout."""

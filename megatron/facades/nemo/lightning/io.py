"""Base classes that modules of NeMo derive from. Checkpoints have the settings of their run, so these do nothing."""


class IOMixin:
    """Makes an object that NeMo can write to files."""


class ConnectorMixin:
    """Makes a model that NeMo can import and export; here tools/checkpoint/convert.py does both."""

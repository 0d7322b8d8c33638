# Nothing to unpack: the anchor of this folder needs the package transformers.
:

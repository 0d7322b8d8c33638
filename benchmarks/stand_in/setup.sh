# Nothing to unpack: the anchor of this folder is this project.
:

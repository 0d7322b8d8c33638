"""Every communication of the library, and the memory that GPUs of one host share."""

"""tools/doctor.py: whether the machines of a run are well, and whether they are alike."""

"""How the processes of a run start and end: groups and device, signals, errors, heartbeats."""

"""The four kinds of participants: importable classes that own checkpointable state."""

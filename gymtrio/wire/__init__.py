"""Frames, codec and messages: one definition of what crosses a process boundary."""

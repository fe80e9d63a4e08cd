"""Admission, fences, episodes and their steps: what stops and what goes on when a checkpoint
opens."""

"""Generations that can be cut, from engines that know nothing of cuts (CUT-2); see `DESIGN.md`."""

"""Checkpoints on disk: opaque state, records, parts, manifests; see DESIGN.md."""

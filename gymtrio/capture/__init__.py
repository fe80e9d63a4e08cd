"""What is kept of model calls: fingerprints, ledger rows, tokens, and cuts of calls in flight."""

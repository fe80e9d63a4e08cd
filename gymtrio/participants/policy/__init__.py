"""The policy model server's part: gate and tickets, exchange with a backend, cuts, ledger export."""

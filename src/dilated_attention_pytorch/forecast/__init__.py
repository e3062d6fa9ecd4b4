"""What a call will cost, before it runs: bytes at its peak, and time relative to dense attention."""

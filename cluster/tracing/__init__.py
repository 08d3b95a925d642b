"""Where a speculative round's time goes: marks that each process stamps when it is asked to, and nothing otherwise."""

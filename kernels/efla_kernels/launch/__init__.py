"""What every kernel family shares: chunks, tiles, arguments, registration and dispatch of ops, the interpreter."""

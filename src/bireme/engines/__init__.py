"""What moves the bytes: one file per engine, the contracts in ``base``."""

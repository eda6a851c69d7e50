"""What happened, where the time went, why it hangs."""
